//! Packs the files of a component into the archive that its function reads. Equal files give equal archives.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};

use super::{glob::Glob, manifest::FileMapping};

/// Limits of the number of files of one component and of their total bytes, as enforced by the server.
const FILES_MAX: usize = 10_000;
const BYTES_MAX: u64 = 256 << 20;
/// The depth limit of nested folders.
const DEPTH_MAX: usize = 64;

/// Packs the files selected by `mappings`, relative to `folder`. `None` if they select no file.
pub(crate) fn archive(
    folder: &Path,
    mappings: &[FileMapping],
    exclude: &[String],
) -> anyhow::Result<Option<Vec<u8>>> {
    let excluded = globs(exclude)?;
    let mut found = BTreeMap::new();
    for mapping in mappings {
        match mapping {
            FileMapping::Pattern(pattern) => {
                let wanted = globs(std::slice::from_ref(pattern))?;
                let start = fixed_start(pattern);
                inside(&start)?;
                walk(&folder.join(&start), &start, 0, &mut |path, file| {
                    if wanted.iter().any(|glob| glob.matches(path)) {
                        found.insert(path.to_owned(), file.to_owned());
                    }
                })?;
            }
            FileMapping::Placed { source, destination } => {
                let destination = PathBuf::from(destination.trim_start_matches('/'));
                let (source_path, source) = (PathBuf::from(source), folder.join(source));
                inside(&destination)?;
                inside(&source_path)?;
                if source.is_file() {
                    found.insert(destination, source);
                    continue;
                }
                if !source.is_dir() {
                    bail!("files: there is no {}", source.display());
                }
                walk(&source, Path::new(""), 0, &mut |path, file| {
                    found.insert(destination.join(path), file.to_owned());
                })?;
            }
        }
    }
    let is_excluded = |file: &Path| {
        file.strip_prefix(folder).is_ok_and(|path| excluded.iter().any(|glob| glob.matches(path)))
    };
    found.retain(|_, file| !is_excluded(file));
    if found.is_empty() {
        return Ok(None);
    }
    Ok(Some(packed(&found)?))
}

fn globs(patterns: &[String]) -> anyhow::Result<Vec<Glob>> {
    let glob = |pattern: &String| {
        Glob::parse(pattern).with_context(|| format!("files: {pattern:?} is not a pattern"))
    };
    patterns.iter().map(glob).collect()
}

/// The folders of a pattern before its first wildcard: all matches are below them.
fn fixed_start(pattern: &str) -> PathBuf {
    let parts: Vec<_> = pattern.trim_start_matches("./").split('/').collect();
    let fixed = parts.iter().take_while(|part| !part.contains(['*', '?'])).count();
    // The last part is a file name, with or without wildcards.
    parts[..fixed.min(parts.len() - 1)].iter().collect()
}

/// Refuses paths that lead out of the manifest's folder.
fn inside(path: &Path) -> anyhow::Result<()> {
    match path.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir)) {
        true => Ok(()),
        false => bail!("files: {:?} leads out of the manifest's folder", path.display().to_string()),
    }
}

/// Visits the files below a folder, with their paths prefixed by `at`.
fn walk(folder: &Path, at: &Path, depth: usize, visit: &mut dyn FnMut(&Path, &Path)) -> anyhow::Result<()> {
    if depth > DEPTH_MAX {
        bail!("files: {} is nested more than {DEPTH_MAX} folders deep", folder.display());
    }
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", folder.display())),
    };
    for entry in entries {
        let entry = entry?;
        let (path, file) = (at.join(entry.file_name()), entry.path());
        if entry.file_type()?.is_dir() {
            walk(&file, &path, depth + 1, visit)?;
        } else if file.is_file() {
            visit(&path, &file);
        }
        // Links to folders are not followed: they may form a loop.
    }
    Ok(())
}

fn packed(files: &BTreeMap<PathBuf, PathBuf>) -> anyhow::Result<Vec<u8>> {
    if files.len() > FILES_MAX {
        bail!("files: there are {} of them; a component has at most {FILES_MAX}", files.len());
    }
    let mut bytes = 0;
    let mut builder = tar::Builder::new(Vec::new());
    for (path, file) in files {
        let content = fs::read(file).with_context(|| format!("cannot read {}", file.display()))?;
        bytes += content.len() as u64;
        if bytes > BYTES_MAX {
            bail!("files: they have more than {} MiB together", BYTES_MAX >> 20);
        }
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(0);
        builder.append_data(&mut header, path, content.as_slice())?;
    }
    Ok(builder.into_inner()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn paths(archive: Option<Vec<u8>>) -> Vec<String> {
        let archive = archive.unwrap_or_default();
        let mut archive = tar::Archive::new(archive.as_slice());
        let path =
            |entry: std::io::Result<tar::Entry<'_, _>>| entry.unwrap().path().unwrap().display().to_string();
        archive.entries().unwrap().map(path).collect()
    }

    #[test]
    fn patterns_and_folders_name_files() {
        let folder = tempfile::tempdir().unwrap();
        for path in ["assets/a.html", "assets/deep/b.html", "assets/c.js", "public/index.html", "notes.txt"] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, path.display().to_string()).unwrap();
        }
        let pattern = |pattern: &str| FileMapping::Pattern(pattern.into());
        let placed = |source: &str, destination: &str| FileMapping::Placed {
            source: source.into(),
            destination: destination.into(),
        };
        for (mappings, exclude, expected) in [
            (vec![pattern("assets/*.html")], vec![], &["assets/a.html"][..]),
            (vec![pattern("assets/**/*.html")], vec![], &["assets/a.html", "assets/deep/b.html"]),
            (vec![pattern("./assets/**/*")], vec!["**/deep/*".to_owned()], &["assets/a.html", "assets/c.js"]),
            (vec![pattern("notes.txt"), pattern("none/*")], vec![], &["notes.txt"]),
            (vec![placed("public", "/")], vec![], &["index.html"]),
            (
                vec![placed("assets", "static")],
                vec!["assets/c.js".into()],
                &["static/a.html", "static/deep/b.html"],
            ),
            (vec![placed("notes.txt", "/docs/n.txt")], vec![], &["docs/n.txt"]),
            (vec![pattern("*.md")], vec![], &[]),
        ] {
            assert_eq!(paths(archive(folder.path(), &mappings, &exclude).unwrap()), expected, "{mappings:?}");
        }
        let twice = [placed("assets", "/")];
        assert_eq!(
            archive(folder.path(), &twice, &[]).unwrap(),
            archive(folder.path(), &twice, &[]).unwrap(),
            "the same files give the same digest"
        );
        for (mapping, expected) in [
            (pattern("../*"), "leads out"),
            (placed("../x", "/"), "leads out"),
            (placed("public", "/../x"), "leads out"),
            (placed("none", "/"), "there is no"),
            (pattern("a["), "is not a pattern"),
        ] {
            let error = format!("{:#}", archive(folder.path(), &[mapping], &[]).unwrap_err());
            assert!(error.contains(expected), "{error}");
        }
    }
}
