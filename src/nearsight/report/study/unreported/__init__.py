"""Which of the unreported settings moves the numbers, and which fits the paper best."""
