//! The compiled model of a state machine: what the engine's machine interprets.
