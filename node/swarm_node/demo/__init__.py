"""The main job end to end on one machine: volunteers train a model together, serve it, and one of them dies on the way.

    swarm-node demo

Real processes, real libp2p on loopback. `plan` says what is run, `nodes` owns the processes, `board` what they have
said, `display` shows it, `stages` are the steps in order, `summary` the end.
"""
