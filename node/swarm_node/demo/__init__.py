"""The main job end to end on one machine: volunteers train a model together and serve it, and one of them dies.

    swarm-node demo

It uses real processes and real libp2p on loopback. `command` plans it, `nodes` owns the processes and keeps what they
have reported, `display` shows it, `stages` are the steps in order, and `demo_answer` asks for a completion, kills a
node on the way and computes the same undisturbed.
"""
