"""What peers say to each other, and how each checks what it hears.

    identity        the key of a node: peer id, signatures, file
    envelope        a signed payload with its purpose, network, subject and times
    records         what a peer publishes about itself, and under which keys
    signed_record   records in their envelopes
    wire            the step between bytes and values, and how to add a message
    checks, limits  what a value may be, and every bound with its reason
    errors, failure every failure, and its form on the wire
    version         the first message between two peers
    *_messages      what training, serving and the control socket say
    proto           the .proto sources and what is generated from them

All of it is pure, but for the identity's file: no sockets, no tasks, no tensors.
"""
