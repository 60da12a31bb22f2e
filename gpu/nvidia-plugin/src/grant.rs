//! The changes of a container with GPUs: variables, libraries, and the file with its limits.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use mayfly_devices::proto::{ContainerAllocateResponse, Mount};
use mayfly_gpu_proto::{
    CONTAINER_DRIVER_DIR, CONTAINER_LIMITS_PATH, CONTAINER_SHIM_PATH, CONTAINER_SIM_PATH, CUDA_SONAME,
    DeviceLimit, FAKE_CUDA_FILE, FAKE_NVML_FILE, LimitsError, LimitsFile, NVML_SONAME, SHIM_FILE,
    container_env, container_sim_env,
};

/// The file of a container's limits in its folder.
pub const LIMITS_FILE: &str = "limits";

/// The folder of the libraries for containers.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// The folder of the shim and the simulated driver: that of the `mayfly` executable.
    pub folder: PathBuf,
    /// The state of the simulated GPUs; `None` on real ones.
    pub sim: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    #[error("the library {0} is not there: it belongs beside the mayfly executable")]
    NoLibrary(PathBuf),
    #[error("cannot make the folder {path}: {source}")]
    Folder { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Limits(#[from] LimitsError),
}

/// Variables and libraries of a container with these GPUs. `limits`: the host's file of the shares.
///
/// # Errors
/// A library is missing.
pub fn response(
    libraries: &Libraries,
    gpus: &[String],
    limits: Option<&Path>,
) -> Result<ContainerAllocateResponse, GrantError> {
    let mut response = ContainerAllocateResponse::default();
    let visible = gpus.join(",");
    for name in ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] {
        response.envs.insert(name.into(), visible.clone());
    }
    if let Some(limits) = limits {
        add_env(&mut response, container_env());
        mount(&mut response, limits, CONTAINER_LIMITS_PATH.into(), false)?;
        mount(&mut response, &libraries.folder.join(SHIM_FILE), CONTAINER_SHIM_PATH.into(), true)?;
    }
    if let Some(sim) = &libraries.sim {
        add_env(&mut response, container_sim_env());
        mount(&mut response, sim, CONTAINER_SIM_PATH.into(), false)?;
        for (file, name) in [(FAKE_CUDA_FILE, CUDA_SONAME), (FAKE_NVML_FILE, NVML_SONAME)] {
            let path = format!("{CONTAINER_DRIVER_DIR}/{name}");
            mount(&mut response, &libraries.folder.join(file), path, true)?;
        }
    }
    Ok(response)
}

fn add_env(response: &mut ContainerAllocateResponse, env: [(&str, &str); 2]) {
    response.envs.extend(env.map(|(name, value)| (name.to_owned(), value.to_owned())));
}

fn mount(
    response: &mut ContainerAllocateResponse,
    host: &Path,
    container_path: String,
    read_only: bool,
) -> Result<(), GrantError> {
    if !host.exists() {
        return Err(GrantError::NoLibrary(host.to_owned()));
    }
    let host_path = host.to_string_lossy().into_owned();
    response.mounts.push(Mount { container_path, host_path, read_only });
    Ok(())
}

/// Writes the limits of a container; an existing file is kept and gets the new limits, as the container's processes
/// have it mapped.
///
/// # Errors
/// The folder cannot be written.
pub fn write_limits(folder: &Path, limits: &[DeviceLimit]) -> Result<PathBuf, GrantError> {
    let failed = |source| GrantError::Folder { path: folder.to_owned(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    let path = folder.join(LIMITS_FILE);
    let is_changed =
        LimitsFile::open(&path).is_ok_and(|file| limits.iter().all(|limit| file.set_limit(limit).is_ok()));
    if !is_changed {
        LimitsFile::create(&path, limits)?;
    }
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_container_on_fake_gpus_gets_limits_and_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let limit =
            DeviceLimit { uuid: "GPU-0".into(), memory_bytes: 8 << 30, core_percent: 50, elastic_percent: 0 };
        let limits = write_limits(&folder.path().join("uid/main"), std::slice::from_ref(&limit)).unwrap();
        assert_eq!(LimitsFile::open(&limits).unwrap().usage()[0].limit, limit);
        let changed = DeviceLimit { core_percent: 60, ..limit };
        let mapped = LimitsFile::open(&limits).unwrap();
        write_limits(&folder.path().join("uid/main"), std::slice::from_ref(&changed)).unwrap();
        assert_eq!(mapped.usage()[0].limit, changed, "a mapped file follows");

        let sim = folder.path().join("sim");
        fs::write(&sim, "").unwrap();
        let libraries = Libraries { folder: folder.path().to_owned(), sim: Some(sim) };
        let missing = response(&libraries, &["GPU-0".into()], Some(&limits)).unwrap_err().to_string();
        assert!(missing.contains(SHIM_FILE), "{missing}");
        for file in [SHIM_FILE, FAKE_CUDA_FILE, FAKE_NVML_FILE] {
            fs::write(folder.path().join(file), "").unwrap();
        }
        let given = response(&libraries, &["GPU-0".into()], Some(&limits)).unwrap();
        assert_eq!(given.envs["CUDA_VISIBLE_DEVICES"], "GPU-0");
        assert_eq!(given.envs["LD_PRELOAD"], CONTAINER_SHIM_PATH);
        let writable: Vec<_> = given.mounts.iter().filter(|mount| !mount.read_only).collect();
        assert_eq!((given.mounts.len(), writable.len()), (5, 2));
    }
}
