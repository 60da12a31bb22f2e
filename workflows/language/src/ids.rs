//! The numbers that a machine assigns, each with its own type: an execution counts threads, effects, timers and map
//! runs in one sequence.

use serde::{Deserialize, Serialize};

macro_rules! id {
    ($(#[$about:meta])* $name:ident) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

id! {
    /// A running flow: the definition's, a branch or an iteration.
    ThreadId
}
id! {
    /// A call in progress outside of the machine.
    EffectId
}
id! {
    /// A timer of the execution.
    TimerId
}
id! {
    /// A map run of the execution.
    MapRunId
}
