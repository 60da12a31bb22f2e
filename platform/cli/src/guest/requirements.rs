//! What a `requirements.txt` refers to on this machine. Its packages are installed again when any of it has changed.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sha2::{Digest as _, Sha256};

/// Files that a folder named by a requirement may have.
const FOLDER_FILES_MAX: usize = 20_000;

/// Options whose value is another file of requirements, relative to the file that has them.
const INCLUDES: [&str; 4] = ["-r", "--requirement", "-c", "--constraint"];
/// Options whose value is a path, relative to the folder in which pip runs.
const PATHS: [&str; 4] = ["-e", "--editable", "-f", "--find-links"];

/// A `requirements.txt` with the files that it includes and the local files and folders that they name.
pub(super) struct Requirements {
    hasher: Sha256,
    /// Where pip runs.
    folder: PathBuf,
    seen: BTreeSet<PathBuf>,
    is_empty: bool,
}

impl Requirements {
    /// Reads the file with this name in a folder; `None` if there is none, or if it requires nothing.
    ///
    /// # Errors
    /// A file or folder that it names cannot be read, or is too large. A missing one is left to pip to report.
    pub(super) fn read(folder: &Path, name: &str) -> Result<Option<Self>> {
        let file = folder.join(name);
        if !file.is_file() {
            return Ok(None);
        }
        let hasher = Sha256::new();
        let mut read = Self { hasher, folder: folder.to_owned(), seen: BTreeSet::new(), is_empty: true };
        read.include(&file)?;
        Ok((!read.is_empty).then_some(read))
    }

    /// The digest of everything that was read and of `salt`, in hexadecimal digits.
    pub(super) fn digest(self, salt: &str) -> String {
        hex::encode(self.hasher.chain_update(salt).finalize())
    }

    fn include(&mut self, file: &Path) -> Result<()> {
        if !self.seen.insert(file.to_owned()) {
            return Ok(());
        }
        if !file.is_file() {
            self.is_empty = false;
            return Ok(());
        }
        let text = fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
        self.part(text.as_bytes());
        for line in lines(&text) {
            if let Some(name) = value(line, &INCLUDES) {
                self.include(&file.parent().unwrap_or(Path::new("")).join(name))?;
                continue;
            }
            self.is_empty = false;
            if let Some(path) = local_path(line) {
                let path = self.folder.join(path);
                self.content(&path).with_context(|| format!("cannot read {}", path.display()))?;
            }
        }
        Ok(())
    }

    /// A file, or all files of a folder with their names.
    fn content(&mut self, path: &Path) -> Result<()> {
        if path.is_file() {
            self.part(&fs::read(path)?);
            return Ok(());
        }
        if !path.is_dir() {
            return Ok(());
        }
        let mut files = Vec::new();
        list(path, &mut files)?;
        files.sort();
        for file in files {
            self.part(file.strip_prefix(path).unwrap_or(&file).as_os_str().as_encoded_bytes());
            self.part(&fs::read(&file)?);
        }
        Ok(())
    }

    fn part(&mut self, bytes: &[u8]) {
        self.hasher.update(bytes.len().to_le_bytes());
        self.hasher.update(bytes);
    }
}

/// The lines without comments.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .map(|line| line.split(" #").next().unwrap_or(line).trim())
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
}

/// The value of one of these options: `-r FILE`, `--requirement=FILE`.
fn value<'a>(line: &'a str, options: &[&str]) -> Option<&'a str> {
    let rest = options.iter().find_map(|option| {
        let rest = line.strip_prefix(option)?;
        // A short option needs no space.
        (rest.starts_with(['=', ' ', '\t']) || !option.starts_with("--")).then_some(rest)
    })?;
    Some(rest.trim_start_matches(['=', ' ', '\t']).trim())
}

/// The path of a requirement that is a file or a folder: `./lib`, `wheels/a.whl`, `name @ file:///a.whl`.
fn local_path(line: &str) -> Option<&str> {
    let line = value(line, &PATHS).unwrap_or(line);
    let line = line.split(';').next().unwrap_or(line);
    let line = match line.split_once(" @ ") {
        Some((_, location)) => location.trim(),
        None => line.trim(),
    };
    let path = line.strip_prefix("file://").unwrap_or(line);
    let path = path.split('[').next().unwrap_or(path);
    let is_path = path.starts_with('.') || path.contains('/') || path.ends_with(".whl");
    (is_path && !path.contains("://") && !path.starts_with('-')).then_some(path)
}

/// All files below a folder, without following links.
fn list(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let kind = entry.file_type()?;
        // Products of Python and of version control.
        if name == "__pycache__" || name.as_encoded_bytes().starts_with(b".") {
            continue;
        }
        if kind.is_dir() {
            list(&entry.path(), files)?;
        } else if kind.is_file() {
            files.push(entry.path());
        }
        if files.len() > FOLDER_FILES_MAX {
            bail!("it has more than {FOLDER_FILES_MAX} files");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_distinguished_from_names() {
        for (line, expected) in [
            ("humanize==4.9.0", None),
            ("./wheels/a-1.0-py3-none-any.whl", Some("./wheels/a-1.0-py3-none-any.whl")),
            ("a-1.0-py3-none-any.whl ; python_version > '3'", Some("a-1.0-py3-none-any.whl")),
            ("a @ file:///w/a.whl", Some("/w/a.whl")),
            ("a @ https://example.com/a.whl", None),
            ("-e ../lib[extra]", Some("../lib")),
            ("--find-links=wheels/", Some("wheels/")),
            ("--index-url https://example.com/simple", None),
        ] {
            assert_eq!(local_path(line), expected, "{line}");
        }
        assert_eq!(value("-rbase.txt", &INCLUDES), Some("base.txt"));
        assert_eq!(value("--requirement base.txt", &INCLUDES), Some("base.txt"));
        assert_eq!(value("--requirements base.txt", &INCLUDES), None);
    }

    #[test]
    fn the_digest_covers_included_and_local_files() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let file = folder.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let read = || Requirements::read(folder.path(), "requirements.txt").unwrap();
        assert!(read().is_none());
        write("requirements.txt", "# nothing\n\n  \n");
        assert!(read().is_none());
        write("requirements.txt", "# a missing file\n-r more/base.txt\n");
        assert!(read().is_some());

        // The included file includes the first one again.
        write(
            "more/base.txt",
            "-c limits.txt # of versions\n-r ../requirements.txt\n./lib\nnone.whl\nhumanize\n",
        );
        write("more/limits.txt", "humanize<5\n");
        write("lib/pyproject.toml", "[project]\n");
        let mut digests = BTreeSet::from([read().unwrap().digest("3.14")]);
        assert!(digests.contains(&read().unwrap().digest("3.14")));
        assert!(digests.insert(read().unwrap().digest("3.15")));
        for (name, text) in [
            ("requirements.txt", "-r more/base.txt\n"),
            ("more/base.txt", "-c limits.txt\n./lib\nnone.whl\n"),
            ("more/limits.txt", "humanize<6\n"),
            ("lib/pyproject.toml", "[project]\nname = 'lib'\n"),
            ("lib/src/new.py", ""),
            ("none.whl", "PK"),
        ] {
            write(name, text);
            assert!(digests.insert(read().unwrap().digest("3.14")), "{name} is not in the digest");
        }
        write("lib/__pycache__/new.pyc", "");
        assert!(!digests.insert(read().unwrap().digest("3.14")));
    }
}
