//! Random numbers from a seed.

use std::{ops::Range, time::Duration};

/// SplitMix64: its numbers for a seed never change with a version of a crate, so that a seed can be replayed.
#[derive(Clone, Debug)]
pub struct Random {
    state: u64,
}

impl Random {
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// A generator of its own, so that the use of one does not shift the numbers of the other.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }

    /// A number of a range that is not empty.
    pub fn below(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next_u64() % (range.end - range.start)
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        #[expect(clippy::cast_precision_loss, reason = "53 bits are kept")]
        let unit = (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        unit < probability
    }

    pub fn duration(&mut self, range: Range<Duration>) -> Duration {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
        Duration::from_micros(self.below(micros(range.start)..micros(range.end)))
    }

    pub fn pick<'a, T>(&mut self, choices: &'a [T]) -> Option<&'a T> {
        if choices.is_empty() {
            return None;
        }
        let at = usize::try_from(self.below(0..choices.len() as u64)).ok()?;
        choices.get(at)
    }
}
