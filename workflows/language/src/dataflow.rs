//! The stages a state's data goes through.
