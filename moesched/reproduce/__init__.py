"""A paper's tables beside what our schedules come to on the virtual clock."""
