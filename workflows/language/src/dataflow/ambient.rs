//! Time and randomness of one evaluation, handed in: the same numbers give the same values on every replay.

use std::cell::Cell;

/// The clock and the source of randomness an evaluation has.
#[derive(Clone, Debug)]
pub struct Ambient {
    now_ms: i64,
    state: Cell<u64>,
}

impl Ambient {
    /// `now_ms` is milliseconds since 1970 in UTC; `seed` decides every random value.
    pub fn new(now_ms: i64, seed: u64) -> Self {
        Self { now_ms, state: Cell::new(seed) }
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

    /// A random double from 0 up to, and without, 1.
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
