"""The verbs in files by subject: attention, experts, pages, time. `Step` has all of them."""
