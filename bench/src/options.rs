//! The options of the command line.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use mayfly_xtask_harness::workspace::Workspace;

/// The build profile of released binaries.
const SHIPPED: &str = "dist";

/// The options of all benchmarks.
#[derive(Debug)]
pub(crate) struct Options {
    /// Fewer and shorter rounds.
    pub(crate) quick: bool,
    /// The build profile of the measured binary.
    pub(crate) profile: String,
    /// An existing binary, measured instead of a new build.
    pub(crate) mayfly: Option<PathBuf>,
    /// The only part to run; `None`: all.
    pub(crate) only: Option<String>,
    /// The file for the figures, if it is not the default.
    pub(crate) json: Option<PathBuf>,
}

impl Options {
    /// Whether this part runs.
    pub(crate) fn wants(&self, part: &str) -> bool {
        self.only.as_deref().is_none_or(|only| only == part)
    }

    /// The measured binary.
    pub(crate) fn mayfly(&self, workspace: &Workspace) -> PathBuf {
        self.mayfly.clone().unwrap_or_else(|| workspace.mayfly(&self.profile))
    }

    /// Reads the arguments after the name of the benchmark; `parts` are the parts of the benchmark.
    pub(crate) fn parse(arguments: &[String], parts: &[&str]) -> Result<Self> {
        let mut options =
            Self { quick: false, profile: SHIPPED.to_owned(), mayfly: None, only: None, json: None };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.quick = true,
                "--profile" => options.profile = arguments.next().context("--profile needs a name")?.clone(),
                "--mayfly" => {
                    let path = arguments.next().context("--mayfly needs a path")?;
                    let path = std::fs::canonicalize(path).with_context(|| format!("no binary at {path}"))?;
                    options.mayfly = Some(path);
                }
                "--json" => options.json = Some(arguments.next().context("--json needs a path")?.into()),
                "--only" => {
                    let part = arguments.next().context("--only needs a part")?;
                    if parts.is_empty() {
                        bail!("this benchmark has no parts: omit --only");
                    }
                    if !parts.contains(&part.as_str()) {
                        bail!("--only takes one of {}", parts.join(", "));
                    }
                    options.only = Some(part.clone());
                }
                _ => bail!(
                    "bench takes --quick, --profile NAME, --mayfly PATH, --json PATH and --only PART, not {argument:?}"
                ),
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str, parts: &[&str]) -> Result<Options> {
        let arguments: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        Options::parse(&arguments, parts)
    }

    #[test]
    fn options_are_read() {
        let options = parse("--quick --profile release --only b --json f.json", &["a", "b"]).unwrap();
        assert!(options.quick && options.wants("b") && !options.wants("a"));
        assert_eq!((options.profile.as_str(), options.json), ("release", Some("f.json".into())));
        let defaults = parse("", &["a"]).unwrap();
        assert!(!defaults.quick && defaults.wants("a") && defaults.mayfly.is_none());
        assert_eq!(defaults.profile, SHIPPED);
    }

    #[test]
    fn wrong_options_are_refused() {
        for (line, parts, says) in [
            ("--fast", &["a"][..], "not \"--fast\""),
            ("--only c", &["a", "b"], "one of a, b"),
            ("--only a", &[], "has no parts"),
            ("--json", &[], "needs a path"),
            ("--mayfly /nonexistent/mayfly", &[], "no binary at"),
        ] {
            let error = parse(line, parts).unwrap_err().to_string();
            assert!(error.contains(says), "{line}: {error}");
        }
    }
}
