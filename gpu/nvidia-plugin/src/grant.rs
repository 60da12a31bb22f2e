//! The changes of a container with GPUs: variables, libraries, device files, and its limits file.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use mayfly_devices::proto::{CdiDevice, ContainerAllocateResponse, DeviceSpec, Mount};
use mayfly_gpu_proto::{
    CONTAINER_DRIVER_DIR, CONTAINER_LIMITS_PATH, CONTAINER_SHIM_PATH, CONTAINER_SIM_PATH, DeviceLimit,
    LIBRARY_PATH_ENV, LimitsError, LimitsFile, SHIM_FILE, container_env, process::live_namespaces,
    sim::STATE_ENV,
};

use crate::{DriverFiles, Gpu};

/// The name of the limits file in a container's folder.
pub const LIMITS_FILE: &str = "limits";
/// The name of a file beside it that is not mounted in the container: the elastic limit, in hundredths of a GPU.
const ELASTIC_FILE: &str = "elastic";

/// The sources of files for containers with GPUs.
#[derive(Clone, Debug)]
pub struct Libraries {
    /// The folder of the shim, beside the `mayfly` executable.
    pub folder: PathBuf,
    pub driver: DriverFiles,
}

#[derive(Debug, thiserror::Error)]
pub enum GrantError {
    #[error("the library {0} is missing: it must be beside the mayfly executable")]
    NoLibrary(PathBuf),
    #[error("{0} of the driver is missing; restart mayfly after an update of the driver")]
    NoDriverFile(PathBuf),
    #[error("cannot make the folder {path}: {source}")]
    Folder { path: PathBuf, source: io::Error },
    #[error("cannot see which processes have ended: {0}")]
    Processes(io::Error),
    #[error(transparent)]
    Limits(#[from] LimitsError),
}

/// The plugin's answer for a container with these GPUs: variables, libraries and device files. `limits`: the host's
/// limits file for shares.
///
/// # Errors
/// A library is missing.
pub fn response(
    libraries: &Libraries,
    gpus: &[&Gpu],
    limits: Option<&Path>,
) -> Result<ContainerAllocateResponse, GrantError> {
    let mut response = ContainerAllocateResponse::default();
    let visible: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    for name in ["NVIDIA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] {
        response.envs.insert(name.into(), visible.join(","));
    }
    if let Some(limits) = limits {
        response.envs.extend(container_env().map(|(name, value)| (name.to_owned(), value.to_owned())));
        mount(&mut response, limits, CONTAINER_LIMITS_PATH.into(), false, GrantError::NoLibrary)?;
        let shim = libraries.folder.join(SHIM_FILE);
        mount(&mut response, &shim, CONTAINER_SHIM_PATH.into(), true, GrantError::NoLibrary)?;
    }
    let driver = &libraries.driver;
    match driver.cdi_devices(gpus) {
        Some(names) => response.cdi_devices = names.into_iter().map(|name| CdiDevice { name }).collect(),
        None => add_driver(&mut response, driver, gpus)?,
    }
    Ok(response)
}

fn add_driver(
    response: &mut ContainerAllocateResponse,
    driver: &DriverFiles,
    gpus: &[&Gpu],
) -> Result<(), GrantError> {
    let missing = match &driver.sim {
        Some(sim) => {
            response.envs.insert(STATE_ENV.into(), CONTAINER_SIM_PATH.into());
            mount(response, sim, CONTAINER_SIM_PATH.into(), false, GrantError::NoLibrary)?;
            GrantError::NoLibrary
        }
        None => GrantError::NoDriverFile,
    };
    if !driver.libraries.is_empty() {
        response.envs.insert(LIBRARY_PATH_ENV.into(), CONTAINER_DRIVER_DIR.into());
    }
    for library in &driver.libraries {
        let path = format!("{CONTAINER_DRIVER_DIR}/{}", library.soname);
        mount(response, &library.path, path, true, missing)?;
    }
    for program in &driver.programs {
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        mount(response, program, format!("/usr/bin/{name}"), true, missing)?;
    }
    for name in driver.nodes(gpus) {
        response.devices.push(DeviceSpec {
            container_path: format!("/dev/{name}"),
            host_path: driver.dev.join(name).to_string_lossy().into_owned(),
            permissions: "rw".into(),
        });
    }
    Ok(())
}

fn mount(
    response: &mut ContainerAllocateResponse,
    host: &Path,
    container_path: String,
    read_only: bool,
    missing: fn(PathBuf) -> GrantError,
) -> Result<(), GrantError> {
    if !host.exists() {
        return Err(missing(host.to_owned()));
    }
    let host_path = host.to_string_lossy().into_owned();
    response.mounts.push(Mount { container_path, host_path, read_only });
    Ok(())
}

/// Writes the limits of a container; an existing file is updated in place, as the container's processes have mapped it.
///
/// # Errors
/// The folder cannot be written.
pub fn write_limits(folder: &Path, limits: &[DeviceLimit]) -> Result<PathBuf, GrantError> {
    let failed = |source| GrantError::Folder { path: folder.to_owned(), source };
    fs::create_dir_all(folder).map_err(failed)?;
    let elastic = limits.iter().map(|limit| limit.elastic_percent).max().unwrap_or(0);
    fs::write(folder.join(ELASTIC_FILE), elastic.to_string()).map_err(failed)?;
    let path = folder.join(LIMITS_FILE);
    let is_changed =
        LimitsFile::open(&path).is_ok_and(|file| limits.iter().all(|limit| file.set_limit(limit).is_ok()));
    if !is_changed {
        LimitsFile::create(&path, limits)?;
    }
    Ok(path)
}

/// The elastic limit that a container was given, in hundredths of a GPU; 0: none. `folder`: that of the container.
pub(crate) fn elastic_percent(folder: &Path) -> u32 {
    let text = fs::read_to_string(folder.join(ELASTIC_FILE)).unwrap_or_default();
    text.trim().parse().unwrap_or(0)
}

/// Releases the memory booked by processes of an earlier start of the container: they cannot release it any more, and
/// the new processes cannot see that they are gone, since each start has a separate pid namespace.
///
/// # Errors
/// The file or the machine's processes cannot be read.
pub fn forget_ended(limits: &Path) -> Result<(), GrantError> {
    let file = LimitsFile::open(limits)?;
    file.region().retain_namespaces(&live_namespaces().map_err(GrantError::Processes)?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use mayfly_gpu_proto::{CUDA_SONAME, FAKE_CUDA_FILE, FAKE_NVML_FILE, NVML_SONAME};

    use super::*;
    use crate::driver::DriverLibrary;

    /// The answer as lines, in which `folder` replaces the test's folder.
    fn lines(response: &ContainerAllocateResponse, folder: &Path) -> Vec<String> {
        let env = response.envs.iter().map(|(name, value)| format!("env {name}={value}"));
        let mounts = response.mounts.iter().map(|one| {
            let access = if one.read_only { "ro" } else { "rw" };
            format!("mount {} {} {access}", one.host_path, one.container_path)
        });
        let device =
            |one: &DeviceSpec| format!("device {} {} {}", one.host_path, one.container_path, one.permissions);
        let devices = response.devices.iter().map(device);
        let cdi = response.cdi_devices.iter().map(|one| format!("cdi {}", one.name));
        let all = env.chain(mounts).chain(devices).chain(cdi);
        let mut all: Vec<_> = all.map(|line| line.replace(&*folder.to_string_lossy(), "")).collect();
        all.sort();
        all
    }

    fn limits_of(folder: &Path, gpu: &Gpu) -> PathBuf {
        let limit = DeviceLimit {
            uuid: gpu.uuid.clone(),
            memory_bytes: 8 << 30,
            core_percent: 50,
            elastic_percent: 0,
        };
        write_limits(&folder.join("limits/uid/main"), &[limit]).unwrap()
    }

    /// A machine whose driver has these files; device files are links to `/dev/null`.
    fn machine(folder: &Path) -> Libraries {
        for path in ["lib/libcuda.so.1", "lib/libnvidia-ml.so.1", "bin/nvidia-smi", SHIM_FILE] {
            fs::create_dir_all(folder.join(path).parent().unwrap()).unwrap();
            fs::write(folder.join(path), "").unwrap();
        }
        fs::create_dir(folder.join("dev")).unwrap();
        for name in ["nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1"] {
            symlink("/dev/null", folder.join("dev").join(name)).unwrap();
        }
        let library = |name: &str| DriverLibrary { soname: name.into(), path: folder.join("lib").join(name) };
        let driver = DriverFiles {
            libraries: [CUDA_SONAME, NVML_SONAME].map(library).into(),
            programs: vec![folder.join("bin/nvidia-smi")],
            dev: folder.join("dev"),
            cdi_folders: vec![folder.join("cdi")],
            sim: None,
        };
        Libraries { folder: folder.to_owned(), driver }
    }

    #[test]
    fn a_container_gets_the_drivers_files_and_its_own_gpu() {
        let folder = tempfile::tempdir().unwrap();
        let machine = machine(folder.path());
        let gpu = Gpu { index: 0, minor: Some(1), ..Gpu::of_test("GPU-b") };
        let whole = [
            "device /dev/nvidia-uvm /dev/nvidia-uvm rw",
            "device /dev/nvidia1 /dev/nvidia1 rw",
            "device /dev/nvidiactl /dev/nvidiactl rw",
            "env CUDA_VISIBLE_DEVICES=GPU-b",
            "env LD_LIBRARY_PATH=/run/mayfly/gpu/driver",
            "env NVIDIA_VISIBLE_DEVICES=GPU-b",
            "mount /bin/nvidia-smi /usr/bin/nvidia-smi ro",
            "mount /lib/libcuda.so.1 /run/mayfly/gpu/driver/libcuda.so.1 ro",
            "mount /lib/libnvidia-ml.so.1 /run/mayfly/gpu/driver/libnvidia-ml.so.1 ro",
        ];
        assert_eq!(lines(&response(&machine, &[&gpu], None).unwrap(), folder.path()), whole);

        let limits = limits_of(folder.path(), &gpu);
        let share = [
            "env LD_PRELOAD=/run/mayfly/gpu/libmayfly_gpu_shim.so",
            "env MAYFLY_GPU_LIMITS=/run/mayfly/gpu/limits",
            "mount /libmayfly_gpu_shim.so /run/mayfly/gpu/libmayfly_gpu_shim.so ro",
            "mount /limits/uid/main/limits /run/mayfly/gpu/limits rw",
        ];
        let mut expected = [&whole[..], &share].concat();
        expected.sort_unstable();
        assert_eq!(lines(&response(&machine, &[&gpu], Some(&limits)).unwrap(), folder.path()), expected);

        fs::remove_file(folder.path().join("lib/libcuda.so.1")).unwrap();
        let error = response(&machine, &[&gpu], None).unwrap_err();
        assert!(matches!(error, GrantError::NoDriverFile(_)), "{error}");
    }

    #[test]
    fn cdi_files_take_the_place_of_the_drivers_unless_one_is_not_supported() {
        let folder = tempfile::tempdir().unwrap();
        let machine = machine(folder.path());
        let gpus = [("GPU-a", 0), ("GPU-b", 1)].map(|(uuid, index)| Gpu { index, ..Gpu::of_test(uuid) });
        let all: Vec<&Gpu> = gpus.iter().collect();
        fs::create_dir(folder.path().join("cdi")).unwrap();
        let describe = |edits: &str| {
            let text = format!(
                r#"{{"cdiVersion": "0.6.0", "kind": "nvidia.com/gpu", "containerEdits": {edits}, "devices": [
                    {{"name": "GPU-a", "containerEdits": {{"env": ["A=1"]}}}},
                    {{"name": "1", "containerEdits": {{"env": ["B=1"]}}}}]}}"#
            );
            fs::write(folder.path().join("cdi/nvidia.json"), text).unwrap();
        };
        describe("{}");
        let visible = "_VISIBLE_DEVICES=GPU-a,GPU-b";
        assert_eq!(
            lines(&response(&machine, &all, None).unwrap(), folder.path()),
            [
                "cdi nvidia.com/gpu=1".to_owned(),
                "cdi nvidia.com/gpu=GPU-a".to_owned(),
                format!("env CUDA{visible}"),
                format!("env NVIDIA{visible}"),
            ]
        );
        describe(r#"{"hooks": [{"hookName": "createContainer", "path": "/bin/x"}]}"#);
        let hooked = response(&machine, &all, None).unwrap();
        assert_eq!((hooked.cdi_devices.len(), hooked.mounts.len()), (2, 0));
        describe(r#"{"additionalGids": [44]}"#);
        let without = response(&machine, &all, None).unwrap();
        assert_eq!((without.cdi_devices.len(), without.mounts.len()), (0, 3));
    }

    #[test]
    fn a_container_on_simulated_gpus_gets_limits_and_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let gpu = Gpu::of_test("GPU-0");
        let limits = limits_of(folder.path(), &gpu);
        let limit = LimitsFile::open(&limits).unwrap().usage()[0].limit.clone();
        assert_eq!((limit.core_percent, limit.memory_bytes), (50, 8 << 30));
        let changed = DeviceLimit { core_percent: 60, ..limit };
        let mapped = LimitsFile::open(&limits).unwrap();
        write_limits(&folder.path().join("limits/uid/main"), std::slice::from_ref(&changed)).unwrap();
        assert_eq!(mapped.usage()[0].limit, changed, "a mapped file follows");

        let sim = folder.path().join("sim");
        fs::write(&sim, "").unwrap();
        let library = |(soname, file): (&str, &str)| DriverLibrary {
            soname: soname.into(),
            path: folder.path().join(file),
        };
        let driver = DriverFiles {
            libraries: [(CUDA_SONAME, FAKE_CUDA_FILE), (NVML_SONAME, FAKE_NVML_FILE)].map(library).into(),
            programs: Vec::new(),
            dev: folder.path().join("dev"),
            cdi_folders: Vec::new(),
            sim: Some(sim),
        };
        let libraries = Libraries { folder: folder.path().to_owned(), driver };
        let missing = response(&libraries, &[&gpu], Some(&limits)).unwrap_err().to_string();
        assert!(missing.contains(SHIM_FILE), "{missing}");
        for file in [SHIM_FILE, FAKE_CUDA_FILE, FAKE_NVML_FILE] {
            fs::write(folder.path().join(file), "").unwrap();
        }
        let given = response(&libraries, &[&gpu], Some(&limits)).unwrap();
        assert_eq!(given.envs["CUDA_VISIBLE_DEVICES"], "GPU-0");
        assert_eq!(given.envs["LD_PRELOAD"], CONTAINER_SHIM_PATH);
        let writable: Vec<_> = given.mounts.iter().filter(|mount| !mount.read_only).collect();
        assert_eq!((given.mounts.len(), writable.len(), given.devices.len()), (5, 2, 0));
    }
}
