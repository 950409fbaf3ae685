"""The model: what ships to the Hub, and nothing else. It imports no other room."""
