"""What a command prints while it runs: `event_contract` lists the events, `emitter` prints them."""
