"""What the chapters, the command line and the calculator share: one idea a module."""
