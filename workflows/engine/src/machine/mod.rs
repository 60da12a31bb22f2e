//! The machine: one event in, actions out.
