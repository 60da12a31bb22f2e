//! Java's random number generator. Step Functions runs on Java (its messages are those of Jackson and Jayway), so
//! seeded results must equal Java's.

/// `java.util.Random`, with the same results for the same seed.
pub(crate) struct JavaRandom(i64);

impl JavaRandom {
    pub(crate) fn new(seed: i64) -> Self {
        Self((seed ^ 0x5_DEEC_E66D) & ((1 << 48) - 1))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the generator keeps the upper bits of 48")]
    fn next(&mut self, bits: u32) -> i32 {
        self.0 = (self.0.wrapping_mul(0x5_DEEC_E66D).wrapping_add(0xB)) & ((1 << 48) - 1);
        (self.0 >> (48 - bits)) as i32
    }

    /// A number from 0 (inclusive) to `bound` (exclusive), which must be positive.
    #[expect(clippy::cast_possible_truncation, reason = "a product of 62 bits shifted by 31")]
    pub(crate) fn next_int(&mut self, bound: i32) -> i32 {
        if bound & (bound - 1) == 0 {
            return ((i64::from(bound) * i64::from(self.next(31))) >> 31) as i32;
        }
        loop {
            let bits = self.next(31);
            let value = bits % bound;
            if bits.wrapping_sub(value).wrapping_add(bound - 1) >= 0 {
                return value;
            }
        }
    }

    pub(crate) fn next_long(&mut self) -> i64 {
        (i64::from(self.next(32)) << 32).wrapping_add(i64::from(self.next(32)))
    }

    /// A number from 0 (inclusive) to 1 (exclusive).
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a double exactly")]
    pub(crate) fn next_double(&mut self) -> f64 {
        let bits = (i64::from(self.next(26)) << 27) + i64::from(self.next(27));
        bits as f64 / (1_u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers printed by a JDK.
    #[test]
    fn a_seed_gives_what_it_gives_in_java() {
        assert_eq!(JavaRandom::new(42).next_int(10), 0);
        assert_eq!(JavaRandom::new(42).next_long(), -5_025_562_857_975_149_833);
        assert_eq!(JavaRandom::new(42).next_double().to_string(), "0.7275636800328681");
        assert_eq!(JavaRandom::new(0).next_double().to_string(), "0.730967787376657");
    }
}
