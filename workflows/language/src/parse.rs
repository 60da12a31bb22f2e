//! From text to the compiled model, with every problem found on the way.
