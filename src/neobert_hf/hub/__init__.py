"""What goes to the Hub: build, verify, card."""
