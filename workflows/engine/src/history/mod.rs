//! The AWS history of an execution, derived from its journal.
