//! A host with simulated GPUs: a folder with the driver's files of a machine with GPUs.
//!
//! `driver` contains the libraries under the names that programs load; `sim` is the state of the devices; `sys`
//! describes their NUMA nodes,
//! `proc` the device files of MIG instances. The state outlives a restart: running containers keep using it.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use mayfly_gpu_proto::{
    CUDA_SONAME, FAKE_CUDA_FILE, FAKE_NVML_FILE, NVML_SONAME,
    sim::{FakeGpu, STATE_FILE, SimError, SimFile, pci_address},
};

use crate::{DriverFiles, GpuSource, MigStrategy, SourceError, driver::DriverLibrary};

#[derive(Debug, thiserror::Error)]
pub enum SimulatedHostError {
    #[error("the library {} is missing: it must be beside the mayfly executable", .0.display())]
    NoLibrary(PathBuf),
    #[error("cannot write {}: {source}", path.display())]
    Write { path: PathBuf, source: io::Error },
    #[error(transparent)]
    State(#[from] SimError),
    #[error(transparent)]
    Source(#[from] SourceError),
}

/// The folder of a simulated host.
#[derive(Clone, Debug)]
pub struct SimulatedHost {
    folder: PathBuf,
    libraries: PathBuf,
}

impl SimulatedHost {
    /// Creates the folder; keeps the state if the GPUs are the same. `libraries`: the folder of the simulated driver.
    ///
    /// # Errors
    /// The simulated NVML is missing, or the folder cannot be written.
    pub fn create(folder: &Path, libraries: &Path, gpus: &[FakeGpu]) -> Result<Self, SimulatedHostError> {
        let nvml = libraries.join(FAKE_NVML_FILE);
        if !nvml.exists() {
            return Err(SimulatedHostError::NoLibrary(nvml));
        }
        let state = folder.join(STATE_FILE);
        write_files(folder, &nvml, gpus)?;
        let is_same = |file: &SimFile| {
            file.gpu_count() == gpus.len()
                && gpus.iter().enumerate().all(|(at, gpu)| file.describe(at) == *gpu)
        };
        if !SimFile::open(&state).is_ok_and(|file| is_same(&file)) {
            SimFile::create(&state, gpus)?;
        }
        Ok(Self { folder: folder.to_owned(), libraries: libraries.to_owned() })
    }

    /// `strategy`: how the instances of GPUs in MIG mode are offered.
    ///
    /// # Errors
    /// The simulated NVML cannot be used.
    pub fn source(&self, strategy: MigStrategy) -> Result<GpuSource, SimulatedHostError> {
        let library = self.folder.join("driver").join(NVML_SONAME);
        Ok(GpuSource::open(Some(&library), &self.folder, strategy)?)
    }

    pub fn state(&self) -> PathBuf {
        self.folder.join(STATE_FILE)
    }

    /// The driver's files for containers.
    pub fn driver(&self) -> DriverFiles {
        let library = |(soname, file): (&str, &str)| DriverLibrary {
            soname: soname.to_owned(),
            path: self.libraries.join(file),
        };
        DriverFiles {
            libraries: [(CUDA_SONAME, FAKE_CUDA_FILE), (NVML_SONAME, FAKE_NVML_FILE)].map(library).into(),
            programs: Vec::new(),
            dev: self.folder.join("dev"),
            cdi_folders: Vec::new(),
            sim: Some(self.state()),
        }
    }
}

fn write_files(folder: &Path, nvml: &Path, gpus: &[FakeGpu]) -> Result<(), SimulatedHostError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| SimulatedHostError::Write { path, source }
    };
    let driver = folder.join("driver");
    fs::create_dir_all(&driver).map_err(failed(&driver))?;
    let link = driver.join(NVML_SONAME);
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(&link)(error)),
        _ => {}
    }
    let nvml = std::path::absolute(nvml).map_err(failed(&link))?;
    symlink(nvml, &link).map_err(failed(&link))?;
    for (index, gpu) in gpus.iter().enumerate() {
        let device = folder.join("sys/bus/pci/devices").join(pci_address(index));
        fs::create_dir_all(&device).map_err(failed(&device))?;
        let path = device.join("numa_node");
        fs::write(&path, format!("{}\n", gpu.numa_node)).map_err(failed(&path))?;
    }
    let minors = folder.join("proc/driver/nvidia-caps");
    fs::create_dir_all(&minors).map_err(failed(&minors))?;
    let path = minors.join("mig-minors");
    fs::write(&path, mig_minors(gpus)).map_err(failed(&path))
}

/// The driver's list of device files for the capabilities of MIG instances.
fn mig_minors(gpus: &[FakeGpu]) -> String {
    let mut list = "config 1\nmonitor 2\n".to_owned();
    let mut number = 3;
    for (minor, gpu) in gpus.iter().enumerate() {
        for instance in &gpu.instances {
            let gi = instance.gpu_instance;
            list.push_str(&format!(
                "gpu{minor}/gi{gi}/access {number}\ngpu{minor}/gi{gi}/ci0/access {}\n",
                number + 1
            ));
            number += 2;
        }
    }
    list
}
