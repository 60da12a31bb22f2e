//! Removal of images that no pod of the node uses, and the images in the node's status.
//!
//! The rules are upstream's (`kubelet/images/image_gc_manager.go`): images that have been unused for too long are
//! removed first; then, when the disk is fuller than the high threshold, the least recently used ones until disk usage
//! is at the low threshold. An image that was found recently stays: a pod that uses it may be about to start.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    path::PathBuf,
    sync::Arc,
    time::Duration,
};

use mayfly_api::k8s::api::core::v1::{ContainerImage, Pod};
use mayfly_informer::Informer;
use mayfly_runtime::{ImageRecord, Runtime};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use crate::pressure::{self, DiskCapacity, PressureSignal};

/// The number of images in the node's status (upstream's `nodeStatusMaxImages`): the largest ones.
const NODE_IMAGES_MAX: usize = 50;
/// The interval of the image scan, which bounds the age of the list in the node's status.
const POLL_INTERVAL: Duration = Duration::from_secs(10);
/// The interval of the removal of unused images (upstream's).
const COLLECT_EVERY: Duration = Duration::from_secs(300);

/// The policy for removing images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageCollection {
    /// Disk usage, in percent, above which removal begins; 100 disables removal by disk usage.
    pub high_percent: u8,
    /// Disk usage, in percent, at which removal stops.
    pub low_percent: u8,
    /// The minimum time since an image was found or last used before it may be removed.
    pub min_age: Duration,
    /// The time since the last use after which an image is removed whatever the disk usage; `None`: never.
    pub max_age: Option<Duration>,
}

impl Default for ImageCollection {
    /// Upstream's values.
    fn default() -> Self {
        Self { high_percent: 85, low_percent: 80, min_age: Duration::from_secs(120), max_age: None }
    }
}

/// An image with all of its names.
#[derive(Clone, Debug, PartialEq, Eq)]
struct KnownImage {
    names: Vec<String>,
    bytes: u64,
    found: Instant,
    /// `None`: not used since it was found.
    last_used: Option<Instant>,
    in_use: bool,
}

/// The names of the images to remove, in order. Pure.
fn plan(
    images: &BTreeMap<String, KnownImage>,
    disk: DiskCapacity,
    config: &ImageCollection,
    now: Instant,
) -> Vec<String> {
    let mut unused: Vec<&KnownImage> = images.values().filter(|image| !image.in_use).collect();
    let touched = |image: &KnownImage| image.last_used.unwrap_or(image.found).max(image.found);
    unused.sort_by_key(|image| touched(image));
    let age = |image: &KnownImage| now.saturating_duration_since(touched(image));
    let used_percent = match disk.capacity {
        0 => 0,
        capacity => {
            100 - u64::from(u8::try_from(disk.available.saturating_mul(100) / capacity).unwrap_or(100))
                .min(100)
        }
    };
    let keep_free = disk.capacity / 100 * u64::from(100 - config.low_percent.min(100));
    let mut wanted = match used_percent >= u64::from(config.high_percent) && config.high_percent < 100 {
        true => keep_free.saturating_sub(disk.available),
        false => 0,
    };
    let mut removed = Vec::new();
    for image in unused {
        let is_old = config.max_age.is_some_and(|max| age(image) >= max);
        let is_in_the_way = wanted > 0 && age(image) >= config.min_age;
        if is_old || is_in_the_way {
            wanted = wanted.saturating_sub(image.bytes);
            removed.extend(image.names.iter().cloned());
        }
    }
    removed
}

/// The records of the images after another scan. Pure.
fn scan(
    before: &BTreeMap<String, KnownImage>,
    records: &[ImageRecord],
    used: &HashSet<String>,
    now: Instant,
) -> BTreeMap<String, KnownImage> {
    let mut images: BTreeMap<String, KnownImage> = BTreeMap::new();
    for record in records {
        let known = before.get(&record.digest);
        let image = images.entry(record.digest.clone()).or_insert_with(|| KnownImage {
            names: Vec::new(),
            bytes: record.bytes,
            found: known.map_or(now, |known| known.found),
            last_used: known.and_then(|known| known.last_used),
            in_use: false,
        });
        image.names.push(record.reference.clone());
        if used.contains(&record.reference) {
            image.in_use = true;
            image.last_used = Some(now);
        }
    }
    images
}

/// The images in the form of the node's status: the largest first, each by its digest and its names.
fn for_node(images: &BTreeMap<String, KnownImage>) -> Vec<ContainerImage> {
    let mut all: Vec<_> = images.iter().collect();
    all.sort_by(|one, other| other.1.bytes.cmp(&one.1.bytes).then_with(|| one.0.cmp(other.0)));
    let entry = |(digest, image): (&String, &KnownImage)| {
        let by_digest = image.names.iter().filter_map(|name| {
            let repository = name.split('@').next()?;
            let end = repository.rfind('/').map_or(0, |at| at + 1);
            let plain = repository[end..].find(':').map_or(repository, |at| &repository[..end + at]);
            Some(format!("{plain}@{digest}"))
        });
        let mut names: Vec<String> = by_digest.chain(image.names.iter().cloned()).collect();
        let mut seen = HashSet::new();
        names.retain(|name| seen.insert(name.clone()));
        ContainerImage { names: Some(names), size_bytes: i64::try_from(image.bytes).ok() }
    };
    all.into_iter().take(NODE_IMAGES_MAX).map(entry).collect()
}

/// Scans the images of the node's runtimes and removes unused ones.
pub(crate) struct ImageCollector {
    node: String,
    config: ImageCollection,
    /// A folder on the disk that images fill.
    folder: PathBuf,
    runtimes: Vec<Arc<dyn Runtime>>,
    pods: Informer<Pod>,
    shown: watch::Sender<Vec<ContainerImage>>,
    /// Whether there is a shortage of each of [`PressureSignal::ALL`].
    shortages: watch::Receiver<[bool; 3]>,
}

impl ImageCollector {
    pub(crate) fn new(
        node: String,
        config: ImageCollection,
        folder: PathBuf,
        runtimes: Vec<Arc<dyn Runtime>>,
        pods: Informer<Pod>,
        shortages: watch::Receiver<[bool; 3]>,
    ) -> Self {
        Self { node, config, folder, runtimes, pods, shown: watch::Sender::default(), shortages }
    }

    fn is_disk_short(&self) -> bool {
        let short = *self.shortages.borrow();
        PressureSignal::ALL
            .into_iter()
            .zip(short)
            .any(|(signal, short)| signal == PressureSignal::Disk && short)
    }

    /// The images for the node's status.
    pub(crate) fn shown(&self) -> watch::Receiver<Vec<ContainerImage>> {
        self.shown.subscribe()
    }

    /// Scans the images until `stop`. Skips runtimes that have not started any container yet.
    pub(crate) async fn run(&self, stop: &CancellationToken) {
        let mut known: HashMap<String, BTreeMap<String, KnownImage>> = HashMap::new();
        let mut collected = Instant::now();
        let mut shortages = self.shortages.clone();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(POLL_INTERVAL) => {}
                Ok(()) = shortages.changed() => {}
            }
            // When the disk is short, unused images are removed at once, before pods are evicted.
            let is_due = collected.elapsed() >= COLLECT_EVERY || self.is_disk_short();
            for runtime in &self.runtimes {
                let Some(store) = runtime.images().filter(|store| store.is_started()) else { continue };
                let images = known.entry(runtime.class().to_owned()).or_default();
                match store.list().await {
                    Ok(records) => *images = scan(images, &records, &self.used(), Instant::now()),
                    Err(error) => {
                        tracing::debug!(%error, "cannot list the images");
                        continue;
                    }
                }
                if is_due {
                    let disk = pressure::measure(&self.folder).disk_capacity();
                    for name in plan(images, disk, &self.config, Instant::now()) {
                        match store.remove(&name).await {
                            Ok(()) => tracing::info!(image = name, "removed an unused image"),
                            Err(error) => {
                                tracing::warn!(image = name, %error, "cannot remove an unused image")
                            }
                        }
                    }
                }
            }
            if is_due {
                collected = Instant::now();
            }
            let all: BTreeMap<_, _> =
                known.values().flatten().map(|(digest, image)| (digest.clone(), image.clone())).collect();
            let shown = for_node(&all);
            self.shown.send_if_modified(|before| std::mem::replace(before, shown.clone()) != shown);
        }
    }

    /// The full names of the images in the specs of this node's pods, including ended ones: their containers may be
    /// restarted.
    fn used(&self) -> HashSet<String> {
        let mut used = HashSet::new();
        for pod in self.pods.list() {
            let Some(spec) = pod.spec.as_ref().filter(|spec| spec.node_name.as_deref() == Some(&self.node))
            else {
                continue;
            };
            let containers = spec.containers.iter().chain(spec.init_containers.iter().flatten());
            let images = containers.filter_map(|container| container.image.as_deref());
            let ephemeral = spec.ephemeral_containers.iter().flatten().filter_map(|one| one.image.as_deref());
            let all = images.chain(ephemeral);
            used.extend(
                all.filter_map(|name| Some(mayfly_distribution::parse_reference(name).ok()?.whole())),
            );
        }
        used
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(reference: &str, digest: &str, bytes: u64) -> ImageRecord {
        let (reference, digest) = (reference.into(), digest.into());
        ImageRecord { reference, digest, id: String::new(), bytes, updated: String::new() }
    }

    fn used(names: &[&str]) -> HashSet<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_unused_go_until_there_is_room() {
        let start = Instant::now();
        let hour = Duration::from_secs(3600);
        let records =
            [record("a", "1", 10), record("b", "2", 10), record("c", "3", 10), record("c2", "3", 10)];
        let first = scan(&BTreeMap::new(), &records, &used(&["a", "b"]), start);
        let later = scan(&first, &records, &used(&["b"]), start + hour);
        let now = start + 2 * hour;
        let config = ImageCollection::default();
        let plan = |available| {
            plan(&later, DiskCapacity { capacity: 100, allocatable: 90, available }, &config, now)
        };
        assert_eq!(plan(16), [""; 0], "below the threshold");
        assert_eq!(plan(12), ["a"], "8 bytes are missing, and it was used last an hour before");
        assert_eq!(plan(9), ["a", "c", "c2"], "both names of an image go; b is in use");
    }

    #[tokio::test(start_paused = true)]
    async fn young_images_stay_and_old_ones_go_whatever_room_there_is() {
        let start = Instant::now();
        let images = scan(&BTreeMap::new(), &[record("a", "1", 10)], &used(&[]), start);
        let plan = |available, config: &ImageCollection, seconds| {
            plan(
                &images,
                DiskCapacity { capacity: 100, allocatable: 90, available },
                config,
                start + Duration::from_secs(seconds),
            )
        };
        let config = ImageCollection::default();
        assert!(plan(0, &config, 119).is_empty(), "a pod may be about to use it");
        assert_eq!(plan(0, &config, 120), ["a"]);
        let aging = ImageCollection { max_age: Some(Duration::from_secs(600)), ..config.clone() };
        assert!(plan(100, &aging, 599).is_empty());
        assert_eq!(plan(100, &aging, 600), ["a"]);
        let never = ImageCollection { high_percent: 100, ..config };
        assert!(plan(0, &never, 9999).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_node_names_the_largest_images_first() {
        let records = [
            record("docker.io/library/a:1", "sha256:1", 10),
            record("localhost:5000/b:2", "sha256:2", 20),
            record("r.example.com/c@sha256:2", "sha256:2", 20),
        ];
        let shown = for_node(&scan(&BTreeMap::new(), &records, &used(&[]), Instant::now()));
        let names: Vec<_> = shown.iter().map(|image| image.names.clone().unwrap()).collect();
        assert_eq!(names[0], ["localhost:5000/b@sha256:2", "r.example.com/c@sha256:2", "localhost:5000/b:2"]);
        assert_eq!(names[1], ["docker.io/library/a@sha256:1", "docker.io/library/a:1"]);
        assert_eq!(shown[0].size_bytes, Some(20));
    }
}
