"""Direct paths between peers: which addresses are dialled and announced, dial back, introductions and hole punching."""
