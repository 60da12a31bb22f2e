//! Before a job starts: its inputs become files. Blocks.

use std::{fs, io, path::Path};

use mayfly_api::job_io::{Inputs, InputsSource, text_of};
use serde_json::Value;

use super::{JobFiles, PodFolder, io_message, tree};

pub(super) fn stage(
    files: &JobFiles,
    folder: &PodFolder,
    source: InputsSource,
    afresh: bool,
) -> Result<(), String> {
    if afresh {
        // A failed attempt's outputs are not those of the next.
        for path in [folder.out(), folder.capture()] {
            remove(&path)?;
        }
    }
    for path in [folder.artifacts(), folder.capture()] {
        fs::create_dir_all(&path).map_err(|error| io_message("make", &path, &error))?;
    }
    // Written under another name first, so that a folder with the final name is complete.
    let (inputs, draft) = (folder.inputs(), folder.path().join("in.draft"));
    if inputs.exists() {
        return Ok(());
    }
    remove(&draft)?;
    fs::create_dir_all(&draft).map_err(|error| io_message("make", &draft, &error))?;
    let wanted = load(files, source)?;
    for (name, value) in &wanted.parameters {
        write(&draft.join(name), text_of(value).as_bytes())?;
    }
    for (name, artifact) in &wanted.artifacts {
        let (from, to) = (files.path(&artifact.digest)?, draft.join(name));
        if artifact.directory {
            tree::unpack(&from, &to, files.artifact_bytes_max).map_err(|error| {
                format!("artifact {name:?} ({}) cannot be unpacked: {error}", artifact.digest)
            })?;
        } else if fs::hard_link(&from, &to).is_err() {
            // Another file system, or one without links.
            fs::copy(&from, &to).map_err(|error| io_message("write", &to, &error))?;
        }
    }
    let stdin = Value::Object(wanted.parameters.into_iter().collect());
    write(&folder.stdin(), stdin.to_string().as_bytes())?;
    fs::rename(&draft, &inputs).map_err(|error| io_message("make", &inputs, &error))
}

fn load(files: &JobFiles, source: InputsSource) -> Result<Inputs, String> {
    match source {
        InputsSource::Inline(inputs) => Ok(*inputs),
        InputsSource::Stored(digest) => {
            let path = files.path(&digest)?;
            let json = fs::read(&path).map_err(|error| io_message("read", &path, &error))?;
            Inputs::parse(&json).map_err(|why| format!("{digest}: {why}"))
        }
    }
}

fn write(path: &Path, content: &[u8]) -> Result<(), String> {
    fs::write(path, content).map_err(|error| io_message("write", path, &error))
}

/// Removes a file or a folder; absent is as good.
pub(super) fn remove(path: &Path) -> Result<(), String> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(io_message("remove", path, &error)),
        _ => Ok(()),
    }
}
