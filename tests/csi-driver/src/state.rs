//! The states of the volumes, stored in a file that outlives the driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};
use tonic::Status;

/// All volumes by their ids.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct VolumeStates {
    pub volumes: BTreeMap<String, DriverVolume>,
    #[serde(skip)]
    folder: PathBuf,
}

/// A volume.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DriverVolume {
    pub name: String,
    pub bytes: i64,
    /// Whether `NodePublishVolume` created it for one pod.
    pub ephemeral: bool,
    /// The node that it is attached to.
    pub attached: Option<String>,
    pub staged: BTreeSet<String>,
    pub published: BTreeSet<String>,
    /// The size that the node has expanded it to.
    pub node_bytes: i64,
    /// The device that a staged block volume is on.
    #[serde(default)]
    pub device: Option<PathBuf>,
}

impl DriverVolume {
    pub fn is_in_use(&self) -> bool {
        self.attached.is_some() || !self.staged.is_empty() || !self.published.is_empty()
    }
}

impl VolumeStates {
    pub(crate) fn open(folder: &Path) -> io::Result<Self> {
        let states = match fs::read(folder.join("state.json")) {
            Ok(content) => serde_json::from_slice(&content)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(error),
        };
        Ok(Self { folder: folder.to_owned(), ..states })
    }

    pub(crate) fn save(&self) -> io::Result<()> {
        let beside = self.folder.join("state.new");
        fs::write(&beside, serde_json::to_vec(self)?)?;
        fs::rename(beside, self.folder.join("state.json"))
    }

    /// The folder of a volume's data.
    pub fn data(&self, id: &str) -> PathBuf {
        self.folder.join(id)
    }

    pub(crate) fn get(&mut self, id: &str) -> Result<&mut DriverVolume, Status> {
        if id.is_empty() {
            return Err(Status::invalid_argument("the volume id is missing"));
        }
        self.volumes.get_mut(id).ok_or_else(|| Status::not_found(format!("there is no volume {id}")))
    }

    /// Creates a volume, unless one with this id exists.
    pub(crate) fn create(&mut self, id: &str, volume: DriverVolume) -> Result<(), Status> {
        let refused = |error: io::Error| Status::internal(error.to_string());
        fs::create_dir_all(self.data(id)).map_err(refused)?;
        self.volumes.entry(id.to_owned()).or_insert(volume);
        Ok(())
    }

    pub(crate) fn remove(&mut self, id: &str) -> Result<(), Status> {
        if self.volumes.remove(id).is_some() {
            fs::remove_dir_all(self.data(id)).map_err(|error| Status::internal(error.to_string()))?;
        }
        Ok(())
    }
}
