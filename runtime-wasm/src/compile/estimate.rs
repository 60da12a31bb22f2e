//! Estimates how long the compilation of a component takes: the size of its code, at the speed of the last compilation.
//!
//! The compiler does not report how much it has done. The time per byte of machine code is about the same for all
//! components on one machine, whereas the time per byte of the file is not: a third to two thirds of a Python function
//! is data.

use std::{io, path::Path, time::Duration};

use wasmparser::{Parser, Payload};

/// The speed before the first measurement, in bytes of WebAssembly code per second: a debug build on two busy cores.
/// Too low rather than too high, because it is better to finish early.
const INITIAL_BYTES_PER_SECOND: f64 = 400_000.0;

/// Bounds of a speed that is read from a file, in bytes per second: others cannot be that of a compiler.
const BYTES_PER_SECOND_SANE: std::ops::RangeInclusive<f64> = 1e3..=1e10;

/// Components with less code are not measured: the start of the compiler process takes most of their time.
const MEASURED_BYTES_MIN: usize = 256 << 10;

/// The unit, which also ends the file.
const LINE_END: &str = " bytes of code per second\n";

/// The speed of this machine's compiler.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct CompileSpeed {
    bytes_per_second: f64,
}

impl Default for CompileSpeed {
    fn default() -> Self {
        Self { bytes_per_second: INITIAL_BYTES_PER_SECOND }
    }
}

impl CompileSpeed {
    /// Takes the speed of a compilation: the bytes of its code, and its duration. Returns whether it counts.
    pub(super) fn measured(&mut self, code_bytes: usize, took: Duration) -> bool {
        let counts = code_bytes >= MEASURED_BYTES_MIN && !took.is_zero();
        if counts {
            self.bytes_per_second = code_bytes as f64 / took.as_secs_f64();
        }
        counts
    }

    /// Reads the speed that [`CompileSpeed::save`] wrote. `None` for a file that is missing or damaged: the next
    /// compilation replaces it.
    pub(super) fn load(file: &Path) -> Option<Self> {
        let text = std::fs::read_to_string(file).ok()?;
        // The end of the line is written last.
        let bytes_per_second = text.strip_suffix(LINE_END)?.parse().ok()?;
        BYTES_PER_SECOND_SANE.contains(&bytes_per_second).then_some(Self { bytes_per_second })
    }

    /// Writes the speed to a file, in bytes per second. Blocks briefly.
    pub(super) fn save(&self, file: &Path) -> io::Result<()> {
        std::fs::write(file, format!("{:.0}{LINE_END}", self.bytes_per_second))
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
    fn the_speed_is_kept_in_a_file_and_a_damaged_one_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("compile-speed");
        assert_eq!(CompileSpeed::load(&file), None);
        let mut speed = CompileSpeed::default();
        assert!(speed.measured(8_000_000, Duration::from_secs(4)));
        speed.save(&file).unwrap();
        assert_eq!(CompileSpeed::load(&file), Some(speed));
        for damaged in [
            "",
            "2000000",
            "2000",
            "x bytes of code per second\n",
            "0 bytes of code per second\n",
            "NaN bytes of code per second\n",
            "-1 bytes of code per second\n",
            "1e300 bytes of code per second\n",
        ] {
            std::fs::write(&file, damaged).unwrap();
            assert_eq!(CompileSpeed::load(&file), None, "{damaged:?}");
        }
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
