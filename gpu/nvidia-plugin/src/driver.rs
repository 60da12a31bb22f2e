//! The files of the NVIDIA driver that containers need: libraries, programs and device files, or CDI files that
//! describe them.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use mayfly_devices::cdi::CdiSpecs;

use crate::Gpu;

/// The kind of NVIDIA's CDI devices.
pub const CDI_KIND: &str = "nvidia.com/gpu";
/// Device files of the driver, in addition to one for each GPU. `nvidia-modeset` is omitted, as it is for displays.
const CONTROL_NODES: [&str; 3] = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"];
/// The libraries for computing and monitoring: those of the capabilities `compute` and `utility` in NVIDIA's container
/// toolkit.
const LIBRARIES: [&str; 14] = [
    "libcuda",
    "libcudadebugger",
    "libnvidia-ml",
    "libnvidia-cfg",
    "libnvidia-nscq",
    "libnvidia-opencl",
    "libnvidia-gpucomp",
    "libnvidia-ptxjitcompiler",
    "libnvidia-fatbinaryloader",
    "libnvidia-allocator",
    "libnvidia-compiler",
    "libnvidia-nvvm",
    "libnvidia-pkcs11",
    "libnvidia-pkcs11-openssl3",
];
/// Mounted at `/usr/bin`.
const PROGRAMS: [&str; 1] = ["nvidia-smi"];
const PROGRAM_FOLDERS: [&str; 3] = ["usr/bin", "usr/local/bin", "opt/bin"];
const LDCONFIG: [&str; 3] = ["/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig"];

/// A library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverLibrary {
    /// The name under which programs load it.
    pub soname: String,
    pub path: PathBuf,
}

/// The driver's files for containers.
#[derive(Clone, Debug)]
pub struct DriverFiles {
    pub libraries: Vec<DriverLibrary>,
    pub programs: Vec<PathBuf>,
    /// The folder with device files.
    pub dev: PathBuf,
    /// Folders of CDI files; the last one takes precedence.
    pub cdi_folders: Vec<PathBuf>,
    /// The state file of simulated GPUs.
    pub sim: Option<PathBuf>,
}

impl DriverFiles {
    /// The installed driver of this machine.
    pub fn of_this_machine() -> Self {
        let programs = PROGRAMS.iter().filter_map(|name| {
            PROGRAM_FOLDERS
                .iter()
                .map(|folder| Path::new("/").join(folder).join(name))
                .find(|path| path.exists())
        });
        Self {
            libraries: libraries(&linker_cache(), std::env::consts::ARCH),
            programs: programs.collect(),
            dev: "/dev".into(),
            cdi_folders: vec!["/etc/cdi".into(), "/var/run/cdi".into()],
            sim: None,
        }
    }

    /// The existing device files of these GPUs, below the folder with device files.
    pub fn nodes(&self, gpus: &[&Gpu]) -> Vec<String> {
        node_names(gpus).into_iter().filter(|name| self.dev.join(name).exists()).collect()
    }

    /// The CDI devices of the GPUs; `None` if no file describes all of them, or one uses edits that the device manager
    /// does not support.
    pub fn cdi_devices(&self, gpus: &[&Gpu]) -> Option<Vec<String>> {
        let specs = CdiSpecs::load(&self.cdi_folders);
        let name_of = |gpu: &&Gpu| {
            let names = [gpu.uuid.clone(), gpu.position()].map(|name| format!("{CDI_KIND}={name}"));
            names.into_iter().find(|name| specs.edits(std::slice::from_ref(name)).is_ok())
        };
        gpus.iter().map(name_of).collect()
    }
}

/// The names of device files in `/dev` for containers with these GPUs.
fn node_names(gpus: &[&Gpu]) -> Vec<String> {
    let mut names: Vec<String> = CONTROL_NODES.iter().map(|name| (*name).to_owned()).collect();
    let own = gpus.iter().filter_map(|gpu| Some(format!("nvidia{}", gpu.minor?)));
    // The capabilities let a container use an instance of a GPU in MIG mode.
    let capabilities = gpus.iter().filter_map(|gpu| gpu.mig.as_ref()).flat_map(|mig| &mig.capabilities);
    let capabilities = capabilities.map(|number| format!("nvidia-caps/nvidia-cap{number}"));
    for name in own.chain(capabilities) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

/// The dynamic linker's list of libraries; empty if it is not available.
fn linker_cache() -> String {
    for program in LDCONFIG {
        match Command::new(program).arg("-p").env("LC_ALL", "C").output() {
            Ok(output) if output.status.success() => {
                return String::from_utf8_lossy(&output.stdout).into_owned();
            }
            Ok(output) => tracing::warn!(program, status = %output.status, "cannot list libraries"),
            Err(_) => {}
        }
    }
    tracing::warn!("no ldconfig lists the driver's libraries: containers get none of them");
    String::new()
}

/// The driver's libraries in the output of `ldconfig -p`, for programs of this architecture. Of several libraries with
/// one name the linker uses the first.
pub fn libraries(listing: &str, architecture: &str) -> Vec<DriverLibrary> {
    let tag = match architecture {
        "x86_64" => "x86-64",
        "aarch64" => "AArch64",
        _ => return Vec::new(),
    };
    let mut found: Vec<DriverLibrary> = Vec::new();
    for line in listing.lines() {
        let Some((name, path)) = line.split_once(" => ") else { continue };
        let Some((soname, properties)) = name.trim().split_once(" (") else { continue };
        let Some((stem, version)) = soname.split_once(".so") else { continue };
        let is_for_us =
            properties.trim_end_matches(')').split(", ").next().is_some_and(|kind| kind.ends_with(tag));
        // Programs load a library by its versioned name; the name without a version is for linking.
        let is_known = LIBRARIES.contains(&stem) && !version.is_empty();
        if is_for_us && is_known && found.iter().all(|known| known.soname != soname) {
            found.push(DriverLibrary { soname: soname.to_owned(), path: path.trim().into() });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MigInstance;

    const LISTING: &str = "\
412 libs found in cache `/etc/ld.so.cache'
\tlibnvidia-ptxjitcompiler.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.1
\tlibnvidia-ml.so.1 (libc6,x86-64) => /opt/driver/libnvidia-ml.so.1
\tlibnvidia-ml.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so.1
\tlibnvidia-ml.so.1 (libc6) => /lib/i386-linux-gnu/libnvidia-ml.so.1
\tlibnvidia-ml.so (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-ml.so
\tlibnvidia-gpucomp.so.570.86.15 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-gpucomp.so.570.86.15
\tlibnvidia-glcore.so.570.86.15 (libc6,x86-64) => /lib/x86_64-linux-gnu/libnvidia-glcore.so.570.86.15
\tlibcuda.so.1 (libc6,x86-64, OS ABI: Linux 2.3.99) => /lib/x86_64-linux-gnu/libcuda.so.1
\tlibcudart.so.12 (libc6,x86-64) => /usr/local/cuda/lib64/libcudart.so.12
\tlibcuda.so.1 (libc6,AArch64) => /usr/aarch64-linux-gnu/lib/libcuda.so.1
Cache generated by: ldconfig (Debian GLIBC 2.41) stable release version 2.41
";

    #[test]
    fn the_drivers_libraries_are_found_in_the_linkers_list() {
        let found = |architecture: &str| -> Vec<String> {
            libraries(LISTING, architecture)
                .into_iter()
                .map(|one| format!("{} {}", one.soname, one.path.display()))
                .collect()
        };
        let folder = "/lib/x86_64-linux-gnu";
        assert_eq!(
            found("x86_64"),
            [
                format!("libnvidia-ptxjitcompiler.so.1 {folder}/libnvidia-ptxjitcompiler.so.1"),
                "libnvidia-ml.so.1 /opt/driver/libnvidia-ml.so.1".to_owned(),
                format!("libnvidia-gpucomp.so.570.86.15 {folder}/libnvidia-gpucomp.so.570.86.15"),
                format!("libcuda.so.1 {folder}/libcuda.so.1"),
            ]
        );
        assert_eq!(found("aarch64"), ["libcuda.so.1 /usr/aarch64-linux-gnu/lib/libcuda.so.1"]);
        assert_eq!(found("s390x"), [""; 0]);
        assert_eq!(libraries("", "x86_64"), []);
    }

    #[test]
    fn device_files_are_those_of_the_minor_numbers() {
        let gpus = [(Some(3), "GPU-a"), (None, "GPU-b"), (Some(0), "GPU-c")]
            .map(|(minor, uuid)| Gpu { minor, ..Gpu::of_test(uuid) });
        let all: Vec<&Gpu> = gpus.iter().collect();
        assert_eq!(node_names(&all), ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia3", "nvidia0"]);
        let mig = |capabilities| Some(MigInstance { capabilities, ..MigInstance::of_test() });
        let instances = [("MIG-a", vec![12, 13]), ("MIG-b", vec![21, 22])].map(|(uuid, numbers)| Gpu {
            minor: Some(1),
            mig: mig(numbers),
            ..Gpu::of_test(uuid)
        });
        let all: Vec<&Gpu> = instances.iter().collect();
        let expected = [12, 13, 21, 22].map(|number| format!("nvidia-caps/nvidia-cap{number}"));
        assert_eq!(node_names(&all)[3..], [&["nvidia1".to_owned()][..], &expected].concat());
    }
}
