//! The clock and randomness of an evaluation, passed in, so that every replay has the same values. Evaluations that
//! exceeded their time limit are passed in, too: on a replay, exactly these fail again.

use std::cell::{Cell, RefCell};

use serde::{Deserialize, Serialize};

use crate::arn::StateMachineArn;

/// An evaluation that was stopped by its time limit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    /// The number of the evaluation, counted from zero.
    #[serde(rename = "n")]
    pub evaluation: u32,
    /// The error's message.
    #[serde(rename = "e")]
    pub error: String,
}

/// The clock and the source of randomness of an evaluation.
#[derive(Clone, Debug)]
pub struct Ambient {
    now_ms: i64,
    state: Cell<u64>,
    /// The number of evaluations begun so far that have a time limit.
    begun: Cell<u32>,
    verdicts: RefCell<Vec<Verdict>>,
    replay: bool,
    /// State machines take turns with evaluations that may take long.
    state_machine: Option<StateMachineArn>,
}

impl Ambient {
    /// `now_ms` is milliseconds since 1970 in UTC; `seed` determines every random value.
    pub fn new(now_ms: i64, seed: u64) -> Self {
        let verdicts = RefCell::new(Vec::new());
        Self {
            now_ms,
            state: Cell::new(seed),
            begun: Cell::new(0),
            verdicts,
            replay: false,
            state_machine: None,
        }
    }

    /// The same for evaluations of this state machine: they take turns with those of other state machines.
    #[must_use]
    pub fn of_state_machine(self, arn: StateMachineArn) -> Self {
        Self { state_machine: Some(arn), ..self }
    }

    /// For the replay of recorded events: exactly the evaluations of the given verdicts fail at their time limit.
    pub fn replay(now_ms: i64, seed: u64, verdicts: Vec<Verdict>) -> Self {
        Self { verdicts: RefCell::new(verdicts), replay: true, ..Self::new(now_ms, seed) }
    }

    /// The same clock and state machine with a seed of its own.
    pub(crate) fn reseeded(&self) -> Self {
        Self { state_machine: self.state_machine.clone(), ..Self::new(self.now_ms, self.next_u64()) }
    }

    /// The state machine whose expressions are evaluated, if it is known.
    pub(crate) fn state_machine(&self) -> Option<&StateMachineArn> {
        self.state_machine.as_ref()
    }

    /// The evaluations that were stopped by their time limit.
    pub fn into_verdicts(self) -> Vec<Verdict> {
        self.verdicts.into_inner()
    }

    /// Returns the number of the next evaluation with a time limit.
    pub(crate) fn next_evaluation(&self) -> u32 {
        self.begun.replace(self.begun.get() + 1)
    }

    /// Whether this is a replay, with the verdicts of an earlier run.
    pub(crate) fn is_replay(&self) -> bool {
        self.replay
    }

    /// The error of an evaluation that the recorded run stopped.
    pub(crate) fn verdict(&self, evaluation: u32) -> Option<String> {
        let verdicts = self.verdicts.borrow();
        verdicts.iter().find(|verdict| verdict.evaluation == evaluation).map(|verdict| verdict.error.clone())
    }

    /// Records that an evaluation was stopped by its time limit.
    pub(crate) fn note(&self, evaluation: u32, error: &str) {
        self.verdicts.borrow_mut().push(Verdict { evaluation, error: error.to_owned() });
    }

    /// Milliseconds since 1970 in UTC.
    pub fn now_ms(&self) -> i64 {
        self.now_ms
    }

    /// 64 random bits (SplitMix64).
    pub fn next_u64(&self) -> u64 {
        let state = self.state.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
        self.state.set(state);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// A random double in the range from 0 (inclusive) to 1 (exclusive).
    pub fn next_double(&self) -> f64 {
        double_of(self.next_u64())
    }

    /// A random UUID, version 4.
    pub fn next_uuid(&self) -> uuid::Uuid {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.next_u64().to_be_bytes());
        bytes[8..].copy_from_slice(&self.next_u64().to_be_bytes());
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    }
}

/// The 53 upper bits as a fraction.
#[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
fn double_of(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats() {
        let (a, b, c) = (Ambient::new(0, 7), Ambient::new(0, 7), Ambient::new(0, 8));
        let first = a.next_uuid();
        assert_eq!(first, b.next_uuid());
        assert_ne!(first, c.next_uuid());
        assert_ne!(first, a.next_uuid());
        assert_eq!(first.get_version_num(), 4);
        assert!((0.0..1.0).contains(&a.next_double()));
    }
}
