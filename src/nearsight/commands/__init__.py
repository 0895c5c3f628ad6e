"""What each command does between its arguments and the library."""
