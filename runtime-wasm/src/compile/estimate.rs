//! Estimates how long the compilation of a component takes: the size of its code, at the speed of the last compilation.
//!
//! The compiler does not report how much it has done. The time per byte of machine code is about the same for all
//! components on one machine, whereas the time per byte of the file is not: a third to two thirds of a Python function
//! is data.

use std::time::Duration;

use wasmparser::{Parser, Payload};

/// The speed before the first measurement, in bytes of WebAssembly code per second: a debug build on two busy cores.
/// Too low rather than too high, because it is better to finish early.
const INITIAL_BYTES_PER_SECOND: f64 = 400_000.0;

/// Components with less code are not measured: the start of the compiler process takes most of their time.
const MEASURED_BYTES_MIN: usize = 256 << 10;

/// The speed of this machine's compiler.
#[derive(Clone, Copy, Debug)]
pub(super) struct CompileSpeed {
    bytes_per_second: f64,
}

impl Default for CompileSpeed {
    fn default() -> Self {
        Self { bytes_per_second: INITIAL_BYTES_PER_SECOND }
    }
}

impl CompileSpeed {
    /// Takes the speed of a compilation: the bytes of its code, and its duration.
    pub(super) fn measured(&mut self, code_bytes: usize, took: Duration) {
        if code_bytes >= MEASURED_BYTES_MIN && !took.is_zero() {
            self.bytes_per_second = code_bytes as f64 / took.as_secs_f64();
        }
    }

    /// The expected duration of a compilation.
    pub(super) fn expected(&self, code_bytes: usize) -> Duration {
        Duration::try_from_secs_f64(code_bytes as f64 / self.bytes_per_second).unwrap_or(Duration::MAX)
    }
}

/// Bytes of code in all modules of a component. For an invalid one, those before the error.
pub(super) fn code_bytes(component: &[u8]) -> usize {
    let payloads = Parser::new(0).parse_all(component).map_while(Result::ok);
    let sizes = payloads.map(|payload| match payload {
        Payload::CodeSectionStart { size, .. } => size as usize,
        _ => 0,
    });
    sizes.sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_compilation_gives_the_speed() {
        let mut speed = CompileSpeed::default();
        assert_eq!(speed.expected(4_000_000), Duration::from_secs(10));
        speed.measured(8_000_000, Duration::from_secs(4));
        assert_eq!(speed.expected(4_000_000), Duration::from_secs(2));
        // Neither a component that is too small nor one that took no measurable time counts.
        speed.measured(1_000, Duration::from_secs(4));
        speed.measured(8_000_000, Duration::ZERO);
        assert_eq!(speed.expected(4_000_000), Duration::from_secs(2));
    }

    #[test]
    fn the_code_of_all_modules_counts_and_data_does_not() {
        let module = |data: usize| {
            format!(
                r#"(core module (memory 1) (func i32.const 1 drop) (data (i32.const 0) "{}"))"#,
                "x".repeat(data)
            )
        };
        let bytes = |text: &str| code_bytes(&wat::parse_str(format!("(component {text})")).unwrap());
        let one = bytes(&module(0));
        assert!(one > 0);
        assert_eq!(bytes(&module(1000)), one);
        assert_eq!(bytes(&format!("{} (component {})", module(0), module(0))), 2 * one);
        assert_eq!((bytes(""), code_bytes(b"no component")), (0, 0));
    }
}
