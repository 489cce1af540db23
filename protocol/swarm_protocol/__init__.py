"""Messages between peers, and the checks of everything that is received.

    identity        the key of a node: peer id, signatures, file
    envelope        a signed payload with its purpose, network, subject and times; records in envelopes
    records         what a peer publishes about itself, and under which DHT keys
    wire            decoding bytes into values, and how to add a message
    checks, limits  valid values, and every bound with its reason
    errors          every failure; failure_messages is its form on the wire
    version         the first message between two peers
    *_messages      the messages of training, serving, the DHT and the control socket
    proto           the .proto sources and what is generated from them

Everything is pure except the identity's file: no sockets, no tasks, no tensors.
"""
