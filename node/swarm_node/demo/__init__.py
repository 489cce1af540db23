"""The whole workflow on one machine: volunteers train a model together and serve it, and one of them is killed.

    swarm-node demo

It uses real processes and real libp2p on loopback. `command` plans the demo, `nodes` owns the processes and keeps what
they report, and `display` shows it. `stages` are the steps in order. `demo_answer` asks for a completion, kills a node
during the answer, and computes the same completion undisturbed.
"""
