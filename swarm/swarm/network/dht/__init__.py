"""The record DHT: Kademlia over this project's own unary calls."""
