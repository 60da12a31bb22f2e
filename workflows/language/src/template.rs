//! Payload templates: Parameters, ResultSelector, ItemSelector, Arguments, Output.
