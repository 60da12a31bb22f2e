//! The output of commands: results to stdout, notes to stderr; as a table, JSON or YAML.

use std::{
    fmt,
    io::{self, Write as _},
};

use serde::Serialize;

/// `--output`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OutputFormat {
    #[default]
    Table,
    /// A table with more columns
    Wide,
    Json,
    Yaml,
    /// Kind and name only
    Name,
}

/// Writes to stdout and flushes.
pub(crate) fn out(text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_ref())?;
    stdout.flush()
}

/// Writes a line to stdout and flushes.
pub(crate) fn line(text: impl fmt::Display) -> io::Result<()> {
    out(format!("{text}\n"))
}

/// Writes a line to stderr; a closed stderr is ignored.
pub(crate) fn note(text: impl fmt::Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// The value as indented JSON, with a final newline.
pub(crate) fn json(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(serde_json::to_string_pretty(value)? + "\n")
}

/// The value as YAML, with a final newline.
pub(crate) fn yaml(value: &impl Serialize) -> anyhow::Result<String> {
    let mut text = serde_saphyr::to_string(value)?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// Prints a result in the requested data format, or as formatted by `human`.
pub(crate) fn result(
    format: OutputFormat,
    value: &impl Serialize,
    human: impl FnOnce() -> String,
) -> anyhow::Result<()> {
    out(match format {
        OutputFormat::Json => json(value)?,
        OutputFormat::Yaml => yaml(value)?,
        OutputFormat::Table | OutputFormat::Wide | OutputFormat::Name => human(),
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn yaml_reads_back_as_what_it_was() {
        let value = json!({
            "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x", "labels": {}},
            "data": {"bool": "true", "number": "1e3", "null": "null", "octal": "0644", "empty": "", "tilde": "~",
                     "text": "a\nb\n", "trailing": "a\n\n", "spaces": "  a ", "colon": "a: b", "hash": "a #b",
                     "date": "2026-01-02", "yes": "yes", "time": "12:30:45", "long": "word ".repeat(60)},
            "list": [], "numbers": [1, -2, 1.5, u64::MAX], "nothing": null, "flag": false
        });
        let text = yaml(&value).unwrap();
        let options = serde_saphyr::Options::default();
        let back: Value = serde_saphyr::from_str_with_options(&text, options).unwrap();
        assert_eq!(back, value, "{text}");
    }
}
