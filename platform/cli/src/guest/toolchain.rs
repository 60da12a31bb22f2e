//! Selects the compiler that produces wasm on this machine.
//!
//! Three ways, in this order: a compiler with the target `wasm32-wasip2` (rustup adds it), one with `wasm32-wasip1`,
//! and one with neither but with the sources of its standard library, together with a wasm linker and wasi-libc
//! (Debian's packages). Detection and choice are separate: [`choose`] is pure.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The oldest compiler that can build the SDK: Rust's major and minor version.
const RUST_MIN: (u32, u32) = (1, 87);

/// The folder of Debian's compilers; rustup's may come first in PATH.
const SYSTEM_BIN: &str = "/usr/bin";
/// The paths of wasi-libc by distribution and version.
const WASI_LIBC: [&str; 3] =
    ["/usr/lib/wasm32-wasi", "/usr/lib/wasm32-wasip1", "/usr/share/wasi-sysroot/lib/wasm32-wasi"];

/// An installed way to produce wasm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Toolchain {
    pub(super) compiler: RustCompiler,
    pub(super) way: Way,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The compiler produces components itself.
    Wasip2,
    /// The compiler produces core modules.
    Wasip1,
    /// The compiler produces core modules once a standard library is built for it.
    BuildStd { linker: PathBuf, libc: PathBuf },
}

/// An installed Rust compiler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RustCompiler {
    pub(super) rustc: PathBuf,
    pub(super) cargo: PathBuf,
    /// The version, such as `1.96.0`.
    pub(super) release: String,
    /// The compiler's full version text; compilers with the same text are considered equal.
    pub(super) verbose_version: String,
    targets: Vec<&'static str>,
    has_std_sources: bool,
}

/// No installed compiler produces wasm; the message says what to install.
#[derive(Debug)]
pub(crate) struct NoToolchain {
    looked_at: Vec<String>,
    missing_libc: bool,
    missing_linker: bool,
}

impl Toolchain {
    /// Detects the installed tool chains and chooses one.
    pub(crate) fn detect() -> Result<Toolchain, NoToolchain> {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let mut compilers = Vec::new();
        if let (Some(rustc), Some(cargo)) = (find(&path, "rustc"), find(&path, "cargo")) {
            compilers.extend(RustCompiler::ask(rustc, cargo));
        }
        let system = OsString::from(SYSTEM_BIN);
        if let Some(rustc) = find(&system, "rustc")
            && compilers.iter().all(|compiler| compiler.rustc != rustc)
        {
            let cargo = find(&system, "cargo").or_else(|| find(&path, "cargo"));
            compilers.extend(cargo.and_then(|cargo| RustCompiler::ask(rustc, cargo)));
        }
        let libc = WASI_LIBC.iter().map(PathBuf::from).find(|dir| dir.join("libc.a").is_file());
        choose(compilers, find_linker(&path), libc)
    }

    /// A one-line description of the chosen tool chain.
    pub(crate) fn describe(&self) -> String {
        let RustCompiler { rustc, release, .. } = &self.compiler;
        let rustc = rustc.display();
        match &self.way {
            Way::Wasip2 => format!("rustc {release} ({rustc}) with the target wasm32-wasip2"),
            Way::Wasip1 => format!("rustc {release} ({rustc}) with the target wasm32-wasip1"),
            Way::BuildStd { linker, libc } => format!(
                "rustc {release} ({rustc}) with a standard library built from its sources, {} and the wasi-libc \
                 in {}",
                linker.display(),
                libc.display()
            ),
        }
    }

    pub(super) fn target(&self) -> &'static str {
        match self.way {
            Way::Wasip2 => "wasm32-wasip2",
            Way::Wasip1 | Way::BuildStd { .. } => "wasm32-wasip1",
        }
    }
}

impl RustCompiler {
    /// Reads a compiler's version and targets; `None` if it cannot be run.
    fn ask(rustc: PathBuf, cargo: PathBuf) -> Option<RustCompiler> {
        let verbose_version = output(&rustc, &["-vV"])?;
        let release = verbose_version.lines().find_map(|line| line.strip_prefix("release: "))?.to_owned();
        let sysroot = PathBuf::from(output(&rustc, &["--print", "sysroot"])?.trim());
        let libraries = sysroot.join("lib/rustlib");
        let targets = ["wasm32-wasip2", "wasm32-wasip1"]
            .into_iter()
            .filter(|target| has_std(&libraries.join(target).join("lib")))
            .collect();
        let has_std_sources = libraries.join("src/rust/library/std/Cargo.toml").is_file();
        Some(RustCompiler { rustc, cargo, release, verbose_version, targets, has_std_sources })
    }

    fn is_recent(&self) -> bool {
        let mut numbers = self.release.split(['.', '-']).map(|part| part.parse::<u32>().unwrap_or(0));
        (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= RUST_MIN
    }
}

/// Chooses the best installed way. Among equal ones the first compiler in PATH is used.
fn choose(
    compilers: Vec<RustCompiler>,
    linker: Option<PathBuf>,
    libc: Option<PathBuf>,
) -> Result<Toolchain, NoToolchain> {
    let recent = || compilers.iter().filter(|compiler| compiler.is_recent());
    for (target, way) in [("wasm32-wasip2", Way::Wasip2), ("wasm32-wasip1", Way::Wasip1)] {
        if let Some(compiler) = recent().find(|compiler| compiler.targets.contains(&target)) {
            return Ok(Toolchain { compiler: compiler.clone(), way });
        }
    }
    let (missing_linker, missing_libc) = (linker.is_none(), libc.is_none());
    if let (Some(linker), Some(libc)) = (linker, libc)
        && let Some(compiler) = recent().find(|compiler| compiler.has_std_sources)
    {
        return Ok(Toolchain { compiler: compiler.clone(), way: Way::BuildStd { linker, libc } });
    }
    let looked_at = compilers.iter().map(shortcoming).collect();
    Err(NoToolchain { looked_at, missing_linker, missing_libc })
}

fn shortcoming(compiler: &RustCompiler) -> String {
    let (major, minor) = RUST_MIN;
    let what = if !compiler.is_recent() {
        format!("is older than {major}.{minor}")
    } else if compiler.has_std_sources {
        "has no target wasm32-wasip2".to_owned()
    } else {
        "has no target wasm32-wasip2, and no sources of the standard library to build one from".to_owned()
    };
    format!("{} ({}) {what}", compiler.rustc.display(), compiler.release)
}

impl fmt::Display for NoToolchain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "no Rust compiler that makes WebAssembly was found")?;
        for line in &self.looked_at {
            writeln!(f, "  {line}")?;
        }
        if self.looked_at.is_empty() {
            writeln!(f, "  no rustc with a cargo, neither in PATH nor in {SYSTEM_BIN}")?;
        }
        if self.missing_linker {
            writeln!(f, "  no wasm-ld in PATH")?;
        }
        if self.missing_libc {
            writeln!(f, "  no wasi-libc in {}", WASI_LIBC.join(", "))?;
        }
        writeln!(f, "install one with rustup:")?;
        writeln!(f, "  rustup target add wasm32-wasip2")?;
        writeln!(f, "or with Debian's packages:")?;
        write!(f, "  apt-get install rustc-web rust-web-src cargo-web lld wasi-libc")
    }
}

impl std::error::Error for NoToolchain {}

fn has_std(libraries: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(libraries) else { return false };
    entries.flatten().any(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        name.starts_with("libstd-") && name.ends_with(".rlib")
    })
}

fn output(program: &Path, arguments: &[&str]) -> Option<String> {
    let output = Command::new(program).args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

fn find(path: &OsString, program: &str) -> Option<PathBuf> {
    std::env::split_paths(path).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// `wasm-ld`, or the newest `wasm-ld-14`, `wasm-ld-19`, … (Debian's packages include the version number).
fn find_linker(path: &OsString) -> Option<PathBuf> {
    if let Some(linker) = find(path, "wasm-ld") {
        return Some(linker);
    }
    std::env::split_paths(path)
        .filter_map(|dir| std::fs::read_dir(dir).ok())
        .flat_map(|entries| entries.flatten())
        .filter_map(|entry| {
            let version = entry.file_name().to_str()?.strip_prefix("wasm-ld-")?.parse::<u32>().ok()?;
            Some((version, entry.path()))
        })
        .max()
        .map(|(_, linker)| linker)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compiler(rustc: &str, release: &str, targets: &[&'static str], has_std_sources: bool) -> RustCompiler {
        RustCompiler {
            rustc: rustc.into(),
            cargo: "cargo".into(),
            release: release.into(),
            verbose_version: String::new(),
            targets: targets.to_vec(),
            has_std_sources,
        }
    }

    fn picked(compilers: Vec<RustCompiler>, linker: bool, libc: bool) -> Option<(String, &'static str)> {
        let toolchain =
            choose(compilers, linker.then(|| "wasm-ld".into()), libc.then(|| "libc".into())).ok()?;
        let way = match toolchain.way {
            Way::Wasip2 => "wasip2",
            Way::Wasip1 => "wasip1",
            Way::BuildStd { .. } => "build",
        };
        Some((toolchain.compiler.rustc.display().to_string(), way))
    }

    #[test]
    fn the_simplest_way_wins() {
        let bare = || compiler("rustup", "1.95.0", &[], false);
        let debian = || compiler("debian", "1.96.0", &[], true);
        let full = || compiler("full", "1.95.0-nightly", &["wasm32-wasip1", "wasm32-wasip2"], true);
        let old = || compiler("old", "1.63.0", &["wasm32-wasip2"], true);
        let p1 = || compiler("p1", "1.90.0", &["wasm32-wasip1"], false);
        let cases = [
            (vec![bare(), debian()], true, true, Some(("debian", "build"))),
            (vec![bare(), debian()], false, true, None),
            (vec![bare(), debian()], true, false, None),
            (vec![debian(), full()], true, true, Some(("full", "wasip2"))),
            (vec![debian(), p1()], true, true, Some(("p1", "wasip1"))),
            (vec![old()], true, true, None),
            (vec![old(), debian()], true, true, Some(("debian", "build"))),
            (vec![bare()], true, true, None),
            (vec![], true, true, None),
        ];
        for (compilers, linker, libc, expected) in cases {
            let names: Vec<_> = compilers.iter().map(|c| c.rustc.clone()).collect();
            let expected = expected.map(|(rustc, way)| (rustc.to_owned(), way));
            assert_eq!(picked(compilers, linker, libc), expected, "{names:?} {linker} {libc}");
        }
    }

    #[test]
    fn without_a_toolchain_the_error_says_both_ways_to_get_one() {
        let compilers =
            vec![compiler("/r/rustc", "1.95.0", &[], false), compiler("/o/rustc", "1.63.0", &[], true)];
        let text = choose(compilers, None, Some("libc".into())).unwrap_err().to_string();
        for part in [
            "/r/rustc (1.95.0) has no target wasm32-wasip2, and no sources",
            "/o/rustc (1.63.0) is older than 1.87",
            "no wasm-ld in PATH",
            "rustup target add wasm32-wasip2",
            "apt-get install rustc-web rust-web-src cargo-web lld wasi-libc",
        ] {
            assert!(text.contains(part), "{part:?} is not in:\n{text}");
        }
        assert!(!text.contains("no wasi-libc"));
    }
}
