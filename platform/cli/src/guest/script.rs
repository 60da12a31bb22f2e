//! Functions in Python, JavaScript and TypeScript: the file, its handler, and the build of a component.
//!
//! A script needs no project. `handler.py` selects the file, `handler.py:main` also a handler with another name.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::cargo::Progress;
use super::limits::BuildLimits;
use super::{javascript, python};

/// The default name of the handler.
pub(crate) const HANDLER: &str = "handle";

/// The folder for build products and copies of the SDK, in the script's folder.
pub(super) const WORK_FOLDER: &str = ".mayfly";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Language {
    Python,
    /// Includes TypeScript, whose types are removed.
    JavaScript,
}

impl Language {
    fn of_extension(extension: &OsStr) -> Option<Self> {
        match extension.to_str()? {
            "py" => Some(Self::Python),
            "js" | "mjs" | "cjs" | "ts" | "mts" | "cts" => Some(Self::JavaScript),
            _ => None,
        }
    }
}

/// A file with a handler.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Script {
    pub(crate) language: Language,
    pub(crate) file: PathBuf,
    /// The name of the handler function.
    pub(crate) handler: String,
}

/// Files that make a folder a project, in order of preference.
const DEFAULT_FILES: [&str; 5] = ["handler.py", "handler.ts", "handler.mts", "handler.js", "handler.mjs"];

impl Script {
    /// Parses `FILE` or `FILE:HANDLER`, depending on the file's extension; `None` for anything else.
    pub(crate) fn parse(text: &Path) -> Option<Self> {
        let by_extension = |file: &Path| Language::of_extension(file.extension()?);
        if let Some(language) = by_extension(text) {
            return Some(Self { language, file: text.to_owned(), handler: HANDLER.to_owned() });
        }
        let (file, handler) = text.to_str()?.rsplit_once(':')?;
        let language = by_extension(Path::new(file))?;
        Some(Self { language, file: file.into(), handler: handler.to_owned() })
    }

    /// The script in a folder that contains one of the default file names.
    pub(crate) fn in_folder(dir: &Path) -> Option<Self> {
        DEFAULT_FILES
            .iter()
            .map(|name| dir.join(name))
            .find(|file| file.is_file())
            .and_then(|file| Self::parse(&file))
    }

    /// The file's name, for messages.
    pub(crate) fn file_name(&self) -> String {
        self.file.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The file's name without its extension.
    pub(super) fn stem(&self) -> Result<&str> {
        let stem = self.file.file_stem().and_then(OsStr::to_str);
        stem.with_context(|| format!("the name of {} is not Unicode", self.file.display()))
    }

    /// Builds the component into `out`; returns the tool chain's name and versions.
    pub(super) fn build(&self, out: &Path, limits: &BuildLimits, progress: Progress<'_>) -> Result<String> {
        match self.language {
            Language::Python => python::build(self, out, limits, progress),
            Language::JavaScript => javascript::build(self, out, limits, progress),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_and_its_handler_are_read_by_extension() {
        for (text, expected) in [
            ("handler.py", Some((Language::Python, "handler.py", "handle"))),
            ("a/b.ts", Some((Language::JavaScript, "a/b.ts", "handle"))),
            ("b.cjs", Some((Language::JavaScript, "b.cjs", "handle"))),
            ("b.cts", Some((Language::JavaScript, "b.cts", "handle"))),
            ("b.mjs:fetch", Some((Language::JavaScript, "b.mjs", "fetch"))),
            ("a:b/handler.py:main", Some((Language::Python, "a:b/handler.py", "main"))),
            ("handler.wasm", None),
            ("handler", None),
            ("handler.txt:main", None),
            (".", None),
        ] {
            let expected = expected.map(|(language, file, handler)| Script {
                language,
                file: file.into(),
                handler: handler.into(),
            });
            assert_eq!(Script::parse(Path::new(text)), expected, "{text}");
        }
    }

    #[test]
    fn a_folder_has_the_first_default_file() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(Script::in_folder(folder.path()), None);
        std::fs::write(folder.path().join("handler.js"), "").unwrap();
        assert_eq!(Script::in_folder(folder.path()).unwrap().file_name(), "handler.js");
        std::fs::write(folder.path().join("handler.py"), "").unwrap();
        assert_eq!(Script::in_folder(folder.path()).unwrap().language, Language::Python);
    }
}
