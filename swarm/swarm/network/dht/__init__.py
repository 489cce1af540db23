"""The record DHT: Kademlia over unary calls."""
