"""The SDK: ask a swarm's models for text, from asyncio (`AsyncClient`) or without it (`Client`).

A client keeps its tokenizers and its knowledge of servers; each generation has its own session.
"""

from __future__ import annotations

from swarm_protocol.sampler import Grammar

from swarm.client.async_client import AsyncClient, ClientOptions
from swarm.client.catalog import ModelStatus, OtherRevision
from swarm.client.publishers import KnownPublishers, UsedRevisions
from swarm.client.request import SamplingParams
from swarm.client.sync_client import Client
from swarm.router.routing import NoChain, NoRoom
from swarm.serving.local_ends.kept_model import KeptModel
from swarm.serving.session.generate import Generation, Token

__all__ = [
    "AsyncClient",
    "Client",
    "ClientOptions",
    "Generation",
    "Grammar",
    "KeptModel",
    "KnownPublishers",
    "ModelStatus",
    "NoChain",
    "NoRoom",
    "OtherRevision",
    "SamplingParams",
    "Token",
    "UsedRevisions",
]
