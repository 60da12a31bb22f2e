//! Reads and writes the files of a container on disk.

use std::{
    fs,
    io::{self, Read as _, Seek as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use containerd_client::types::Mount;
use mayfly_runtime::{ContainerId, ContainerSpec, ContainerState};
use serde::{Deserialize, Serialize};

use crate::{layout::Layout, log_shim::LogShimConfig};

/// The maximum size of a termination message, in bytes, and of its part from the log (upstream's limits).
const MESSAGE_BYTES_MAX: usize = 4096;
const MESSAGE_LOG_BYTES_MAX: usize = 2048;
/// The part of the log that is read for it: more than a line and a message.
const MESSAGE_LOG_READ_BYTES: usize = 64 << 10;
/// The number of log lines that become a termination message.
const MESSAGE_LOG_LINES_MAX: usize = 80;

/// The state of a container that a restarted process needs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ContainerRecord {
    pub(crate) started: jiff::Timestamp,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
    pub(crate) stdin_once: bool,
    pub(crate) has_input_file: bool,
    pub(crate) stop_signal: u32,
    pub(crate) log: std::path::PathBuf,
    pub(crate) message_from_log: bool,
}

impl ContainerRecord {
    /// Whether the container has a standard input.
    pub(crate) fn has_input(&self) -> bool {
        self.stdin || self.has_input_file
    }

    /// The named pipes of the outputs, below the container's folder, if it uses them: see
    /// [`crate::log_shim`].
    pub(crate) fn output_pipes(&self, folder: &Path) -> Option<[PathBuf; 2]> {
        (self.has_input() && !self.tty).then(|| ["stdout", "stderr"].map(|name| folder.join(name)))
    }
}

/// The exit record of a container; stored on disk as long as its sandbox exists.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExitRecord {
    pub(crate) started: jiff::Timestamp,
    pub(crate) finished: jiff::Timestamp,
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl From<ExitRecord> for ContainerState {
    fn from(exit: ExitRecord) -> Self {
        let ExitRecord { started, finished, exit_code, reason, message } = exit;
        Self::Exited { started, finished, exit_code, reason, message }
    }
}

pub(super) fn write_container_files(
    folder: &Path,
    record: &ContainerRecord,
    spec: &ContainerSpec,
    socket: std::path::PathBuf,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let log = LogShimConfig {
        log: spec.log_path.clone(),
        socket,
        capture: spec.files.as_ref().map(|files| files.capture.clone()),
        pipes: record.output_pipes(folder),
    };
    fs::write(folder.join("log.json"), serde_json::to_vec(&log)?)?;
    fs::write(folder.join("container.json"), serde_json::to_vec(record)?)?;
    let message = folder.join("message");
    fs::write(&message, "")?;
    // The container writes the file as any user.
    fs::set_permissions(&message, fs::Permissions::from_mode(0o666))?;
    let input = record.has_input().then(|| folder.join("stdin"));
    for pipe in input.into_iter().chain(log.pipes.into_iter().flatten()) {
        match nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR) {
            Err(nix::errno::Errno::EEXIST) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// The termination message of a container: its message file, or else the end of its log.
pub(super) fn message(file: &Path, log: Option<&Path>) -> String {
    let said = read_at(file, |_| 0, MESSAGE_BYTES_MAX).unwrap_or_default();
    if !said.is_empty() {
        return String::from_utf8_lossy(&said).into_owned();
    }
    let Some(log) = log else { return String::new() };
    let from = |length: u64| length.saturating_sub(MESSAGE_LOG_READ_BYTES as u64);
    let part = read_at(log, from, MESSAGE_LOG_READ_BYTES).unwrap_or_default();
    let text = String::from_utf8_lossy(&part);
    let text = match part.len() < MESSAGE_LOG_READ_BYTES {
        true => &*text,
        // The first line may be cut off.
        false => text.split_once('\n').map_or("", |(_, rest)| rest),
    };
    let lines: Vec<&str> = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect();
    let last = lines[lines.len().saturating_sub(MESSAGE_LOG_LINES_MAX)..].join("\n");
    let mut from = last.len().saturating_sub(MESSAGE_LOG_BYTES_MAX);
    while !last.is_char_boundary(from) {
        from += 1;
    }
    last[from..].to_owned()
}

/// At most `bytes_max` bytes of a file, from the position that `from` computes from its length. The container decides
/// how long the file is.
fn read_at(file: &Path, from: impl Fn(u64) -> u64, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut file = fs::File::open(file)?;
    let from = from(file.metadata()?.len());
    file.seek(io::SeekFrom::Start(from))?;
    let mut bytes = Vec::new();
    file.take(bytes_max as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The folders of a snapshot's layers, the topmost first.
pub(super) fn layers(mounts: &[Mount]) -> Vec<std::path::PathBuf> {
    let Some(mount) = mounts.first() else { return Vec::new() };
    if mount.r#type == "bind" {
        return vec![mount.source.clone().into()];
    }
    let option = |name: &str| mount.options.iter().find_map(|option| option.strip_prefix(name));
    let upper = option("upperdir=").into_iter();
    let lower = option("lowerdir=").into_iter().flat_map(|folders| folders.split(':'));
    upper.chain(lower).map(Into::into).collect()
}

/// Reads a state file of a container after a restart. Blocks.
pub(crate) fn load<T: serde::de::DeserializeOwned>(
    layout: &Layout,
    id: &ContainerId,
    file: &str,
) -> Option<T> {
    serde_json::from_slice(&fs::read(layout.container(id).join(file)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn termination_message_comes_from_the_file_or_the_log() {
        let folder = tempfile::tempdir().unwrap();
        let (file, log) = (folder.path().join("message"), folder.path().join("0.log"));
        fs::write(&log, "T stdout F first line\nT stderr F last: bad\n").unwrap();
        assert_eq!(message(&file, None), "");
        assert_eq!(message(&file, Some(&log)), "first line\nlast: bad");
        fs::write(&file, "said").unwrap();
        assert_eq!(message(&file, Some(&log)), "said");
        fs::write(&file, "x".repeat(5000)).unwrap();
        assert_eq!(message(&file, None).len(), MESSAGE_BYTES_MAX);
        // A sparse file that no memory holds.
        fs::File::create(&file).unwrap().set_len(1 << 42).unwrap();
        assert_eq!(message(&file, None).len(), MESSAGE_BYTES_MAX);
        fs::write(&file, "").unwrap();
        let lines: Vec<u8> =
            (0..10_000).flat_map(|n| format!("T stdout F line {n}\n").into_bytes()).collect();
        fs::write(&log, [&lines[..], b"T stdout F last \xff\n"].concat()).unwrap();
        let said = message(&file, Some(&log));
        assert!(said.starts_with("line 9921\n") && said.ends_with("line 9999\nlast \u{fffd}"), "{said}");
    }

    #[test]
    fn layers_of_a_snapshot() {
        let mount = |kind: &str, source: &str, options: &[&str]| Mount {
            r#type: kind.into(),
            source: source.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Mount::default()
        };
        let overlay = mount("overlay", "overlay", &["workdir=/w", "upperdir=/u", "lowerdir=/b:/a"]);
        assert_eq!(layers(&[overlay]), ["/u", "/b", "/a"].map(std::path::PathBuf::from));
        assert_eq!(layers(&[mount("bind", "/only", &["rw"])]), [std::path::PathBuf::from("/only")]);
    }
}
