"""The verbs of `Step`, with a file for each subject: attention, experts, pages, time."""
