//! One driver: its program, what is known of it, and the steps that mount and unmount.

use std::{
    collections::HashSet,
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use parking_lot::Mutex;

use crate::{
    CallOptions,
    call::{self, DriverAnswer, DriverCapabilities, FlexError},
    mounts::{is_mount_point, source_of},
};

/// The timeout of a driver's call: upstream's value.
pub const CALL_TIMEOUT: Duration = Duration::from_secs(120);
/// The timeout of the wait for a device: upstream's value.
const ATTACH_TIMEOUT: Duration = Duration::from_secs(600);

/// The program of `vendor/driver`, or of `driver`, below the folder of drivers.
///
/// # Errors
/// The name is not of this form.
pub fn program_of(plugins: &Path, driver: &str) -> Result<PathBuf, FlexError> {
    let name = driver.rsplit('/').next().unwrap_or_default();
    let is_plain = |part: &str| !part.is_empty() && !part.starts_with('.') && !part.contains('~');
    if driver.split('/').count() > 2 || !driver.split('/').all(is_plain) {
        let why = "its name is not vendor/driver".to_owned();
        return Err(FlexError::NoDriver { driver: driver.into(), why });
    }
    Ok(plugins.join(driver.replace('/', "~")).join(name))
}

/// A driver. Its program is looked up at each use, so that it can be added, replaced and removed.
#[derive(Debug)]
pub struct FlexDriver {
    name: String,
    program: PathBuf,
    call_timeout: Duration,
    known: Mutex<Option<KnownProgram>>,
}

/// The answer of `init`, for the program file that was called.
#[derive(Clone, Debug)]
struct KnownProgram {
    /// Inode, length and time of modification.
    file: (u64, u64, i64),
    capabilities: DriverCapabilities,
    not_supported: HashSet<&'static str>,
}

impl FlexDriver {
    /// `name`: for messages, as `vendor/driver`.
    pub fn new(name: impl Into<String>, program: PathBuf, call_timeout: Duration) -> Self {
        Self { name: name.into(), program, call_timeout, known: Mutex::default() }
    }

    /// Whether the program is installed.
    pub fn is_installed(&self) -> bool {
        self.program.exists()
    }

    /// The driver's capabilities. `init` is called for a new driver, and after its file was replaced.
    ///
    /// # Errors
    /// The program cannot be run, or `init` fails.
    pub async fn capabilities(&self) -> Result<DriverCapabilities, FlexError> {
        let no_driver = |error: io::Error| FlexError::NoDriver {
            driver: self.name.clone(),
            why: format!("{}: {error}", self.program.display()),
        };
        let found = fs::metadata(&self.program).map_err(no_driver)?;
        let modified = found.mtime_nsec().saturating_add(found.mtime().saturating_mul(1 << 30));
        let file = (found.ino(), found.len(), modified);
        if let Some(known) = self.known.lock().as_ref().filter(|known| known.file == file) {
            return Ok(known.capabilities.clone());
        }
        let answer = call::call(&self.name, &self.program, "init", &[], self.call_timeout).await?;
        let capabilities = answer.capabilities;
        let known = KnownProgram { file, capabilities: capabilities.clone(), not_supported: HashSet::new() };
        *self.known.lock() = Some(known);
        Ok(capabilities)
    }

    /// Calls the driver; `None` if it does not support the call, which is remembered until the driver changes. The
    /// program may be replaced during the call: its answer then says nothing about the new one.
    async fn call(&self, call: &'static str, arguments: &[&str]) -> Result<Option<DriverAnswer>, FlexError> {
        let called = match self.known.lock().as_ref() {
            Some(known) if known.not_supported.contains(call) => return Ok(None),
            known => known.map(|known| known.file),
        };
        let limit = if call == "waitforattach" { ATTACH_TIMEOUT } else { self.call_timeout };
        match call::call(&self.name, &self.program, call, arguments, limit).await {
            Err(FlexError::NotSupported { .. }) => {
                if let Some(known) = self.known.lock().as_mut().filter(|known| Some(known.file) == called) {
                    known.not_supported.insert(call);
                }
                Ok(None)
            }
            answered => answered.map(Some),
        }
    }

    /// [`Self::call`] for a driver that may have been removed from the node meanwhile; the caller then undoes its
    /// mounts.
    async fn call_if_there(&self, call: &'static str, arguments: &[&str]) -> Result<(), FlexError> {
        match self.call(call, arguments).await {
            Err(FlexError::NoDriver { driver, why }) => {
                tracing::warn!(driver, call, why, "unmounting a FlexVolume without its driver");
                Ok(())
            }
            called => called.map(|_| ()),
        }
    }

    fn nothing_mounted(&self, call: &str, path: &Path) -> FlexError {
        let why = format!("it answered Success, but nothing is mounted at {}", path.display());
        FlexError::Failed { driver: self.name.clone(), call: call.into(), why }
    }

    /// Attaches the device to this node and mounts it at `path`; keeps an existing mount. Nothing is mounted there if
    /// the driver leaves mounting to [`Self::mount`].
    ///
    /// # Errors
    /// A call fails, or its success is not true.
    pub async fn mount_device(
        &self,
        path: &Path,
        node: &str,
        options: &CallOptions,
    ) -> Result<(), FlexError> {
        if is_mount_point(path) {
            return Ok(());
        }
        let options = options.json();
        let attached = self.call("attach", &[&options, node]).await?;
        let device = attached.map(|answer| answer.device).unwrap_or_default();
        let waited = self.call("waitforattach", &[&device, &options]).await?;
        let device = waited.map(|answer| answer.device).filter(|device| !device.is_empty()).unwrap_or(device);
        fs::create_dir_all(path).map_err(node_error)?;
        let mounted = self.call("mountdevice", &[&path.to_string_lossy(), &device, &options]).await?;
        if mounted.is_some() && !is_mount_point(path) {
            return Err(self.nothing_mounted("mountdevice", path));
        }
        Ok(())
    }

    /// Mounts a volume at `path`, which is not a mount point. `device`: the path given to [`Self::mount_device`], which
    /// is bound there if the driver leaves that to its caller.
    ///
    /// # Errors
    /// The call fails, or its success is not true.
    pub async fn mount(
        &self,
        path: &Path,
        device: Option<&Path>,
        read_only: bool,
        options: &CallOptions,
    ) -> Result<(), FlexError> {
        fs::create_dir_all(path).map_err(node_error)?;
        let answer = self.call("mount", &[&path.to_string_lossy(), &options.json()]).await?;
        match (answer, device) {
            (Some(_), _) => {}
            (None, Some(device)) => bind(device, path, read_only)?,
            (None, None) => {
                return Err(FlexError::NotSupported { driver: self.name.clone(), call: "mount".into() });
            }
        }
        if !is_mount_point(path) {
            return Err(self.nothing_mounted("mount", path));
        }
        Ok(())
    }

    /// Expands the volume that is mounted at `path` to `new_bytes`, then its file system, unless the driver does both in
    /// one call. Drivers may support one of the calls only.
    ///
    /// # Errors
    /// A call fails, or the driver supports neither.
    pub async fn expand(
        &self,
        path: &Path,
        new_bytes: u64,
        old_bytes: u64,
        options: &CallOptions,
    ) -> Result<(), FlexError> {
        let capabilities = self.capabilities().await?;
        let (options, mounted) = (options.json(), path.to_string_lossy());
        let (new, old) = (new_bytes.to_string(), old_bytes.to_string());
        let volume = self.call("expandvolume", &[&options, &mounted, &new, &old]).await?;
        let file_system = if capabilities.requires_fs_resize {
            let device = source_of(path).unwrap_or_default();
            self.call("expandfs", &[&options, &device, &mounted, &new, &old]).await?
        } else {
            None
        };
        match volume.or(file_system) {
            Some(_) => Ok(()),
            None => Err(FlexError::NotSupported { driver: self.name.clone(), call: "expandvolume".into() }),
        }
    }

    /// Undoes [`Self::mount`], also where the driver was removed or unmounts nothing.
    ///
    /// # Errors
    /// The call fails, or the kernel refuses to unmount.
    pub async fn unmount(&self, path: &Path) -> Result<(), FlexError> {
        self.undo_mount("unmount", path).await
    }

    /// Undoes [`Self::mount_device`] and detaches the volume from this node; removes the folder.
    ///
    /// # Errors
    /// A call fails, or the kernel refuses to unmount.
    pub async fn unmount_device(&self, path: &Path, node: &str, volume: &str) -> Result<(), FlexError> {
        self.undo_mount("unmountdevice", path).await?;
        self.call_if_there("detach", &[volume, node]).await?;
        match fs::remove_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(node_error(error)),
            _ => Ok(()),
        }
    }

    async fn undo_mount(&self, call: &'static str, path: &Path) -> Result<(), FlexError> {
        if is_mount_point(path) {
            self.call_if_there(call, &[&path.to_string_lossy()]).await?;
        }
        // Mounts that the driver does not undo: bind mounts, and calls that it does not support.
        if is_mount_point(path) {
            umount2(path, MntFlags::MNT_DETACH).map_err(|error| node_error(error.into()))?;
        }
        Ok(())
    }
}

fn node_error(error: io::Error) -> FlexError {
    FlexError::Node(error.to_string())
}

fn bind(from: &Path, to: &Path, read_only: bool) -> Result<(), FlexError> {
    let none: Option<&str> = None;
    let failed = |error: nix::errno::Errno| node_error(error.into());
    mount(Some(from), to, none, MsFlags::MS_BIND, none).map_err(failed)?;
    if read_only {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(Some(from), to, none, flags, none).map_err(failed)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// Installs a driver as installers do: a new file takes the place of the old one.
    fn install(program: &Path, script: &str) {
        let new = program.with_extension("new");
        fs::write(&new, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&new, fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(new, program).unwrap();
    }

    const SUCCESS: &str = r#"echo '{"status": "Success"}'"#;

    #[tokio::test]
    async fn a_program_that_is_replaced_during_a_call_is_not_judged_by_it() {
        let folder = tempfile::tempdir().unwrap();
        let program = folder.path().join("disk");
        // Waits at a gate in each call but `init`: opening a named pipe waits for its writer.
        let gate = folder.path().join("gate");
        assert!(std::process::Command::new("mkfifo").arg(&gate).status().unwrap().success());
        let refuse = r#"echo '{"status": "Not supported"}'; exit 1"#;
        let old = format!(
            "[ $1 = init ] && {{ {SUCCESS}; exit; }}\ncat '{}' > /dev/null\n{refuse}",
            gate.display()
        );
        install(&program, &old);
        let driver = std::sync::Arc::new(FlexDriver::new("disk", program.clone(), CALL_TIMEOUT));
        driver.capabilities().await.unwrap();
        let called = driver.clone();
        let waiting = tokio::spawn(async move { called.call("mount", &[]).await });
        // Opens when the driver has opened its end.
        let opened = gate.clone();
        let writer = tokio::task::spawn_blocking(move || fs::OpenOptions::new().write(true).open(opened));
        let writer = writer.await.unwrap().unwrap();
        install(&program, SUCCESS);
        driver.capabilities().await.unwrap();
        drop(writer);
        assert_eq!(waiting.await.unwrap(), Ok(None), "the old program does not support the call");
        assert!(driver.call("mount", &[]).await.unwrap().is_some(), "the new one does");
    }

    #[tokio::test]
    async fn a_volume_is_expanded_by_the_calls_that_the_driver_has() {
        let folder = tempfile::tempdir().unwrap();
        let (program, path) = (folder.path().join("disk"), folder.path().join("volume"));
        let log = folder.path().join("calls");
        let options = CallOptions::default();
        for (supported, resizes, expected) in [
            ("expandvolume expandfs", true, Some(vec!["expandvolume", "expandfs"])),
            ("expandvolume", true, Some(vec!["expandvolume", "expandfs"])),
            ("expandfs", true, Some(vec!["expandvolume", "expandfs"])),
            ("expandvolume expandfs", false, Some(vec!["expandvolume"])),
            ("expandfs", false, None),
            ("", true, None),
        ] {
            let script = format!(
                "[ $1 = init ] && {{ echo '{{\"status\": \"Success\", \"capabilities\": {{\"requiresFSResize\": {resizes}}}}}'; exit; }}\n\
                 echo \"$@\" >> {}\ncase ' {supported} ' in *\" $1 \"*) {SUCCESS}; exit;; esac\n\
                 echo '{{\"status\": \"Not supported\"}}'; exit 1",
                log.display()
            );
            install(&program, &script);
            let driver = FlexDriver::new("disk", program.clone(), CALL_TIMEOUT);
            let expanded = driver.expand(&path, 200, 100, &options).await;
            let calls = fs::read_to_string(&log).unwrap_or_default();
            fs::remove_file(&log).unwrap();
            let Some(expected) = expected else {
                assert!(matches!(expanded, Err(FlexError::NotSupported { .. })), "{supported}: {expanded:?}");
                continue;
            };
            assert_eq!(expanded, Ok(()), "{supported}");
            let mounted = path.to_string_lossy();
            let line = |name: &&str| match *name {
                "expandvolume" => format!("expandvolume {{}} {mounted} 200 100"),
                name => format!("{name} {{}}  {mounted} 200 100"),
            };
            assert_eq!(
                calls.lines().collect::<Vec<_>>(),
                expected.iter().map(line).collect::<Vec<_>>(),
                "{supported}"
            );
        }
    }
}
