//! A node with eight GPUs and the links of a machine with two processors, in which pairs of GPUs have an NVLink bridge.

use std::time::Duration;

use mayfly_api::gpu_placement::parse_matrix;
use mayfly_gpu_nvidia_plugin::{RESOURCE_CORE, RESOURCE_GPU};
use mayfly_runtime::{DeviceError, NodeDevices as _, PodUid};

use crate::node::{GpuNode, TestHost, host, pod, pod_with};

/// As `nvidia-smi topo -m` prints it, with the columns of a network card and of the processors.
const TOPOLOGY: &str = "
        GPU0 GPU1 GPU2 GPU3 GPU4 GPU5 GPU6 GPU7 NIC0 CPU-Affinity NUMA-Affinity
GPU0    X    NV4  NODE NODE SYS  SYS  SYS  SYS  PIX  0-31         0
GPU1    NV4  X    NODE NODE SYS  SYS  SYS  SYS  NODE 0-31         0
GPU2    NODE NODE X    NV4  SYS  SYS  SYS  SYS  NODE 0-31         0
GPU3    NODE NODE NV4  X    SYS  SYS  SYS  SYS  NODE 0-31         0
GPU4    SYS  SYS  SYS  SYS  X    NV4  NODE NODE SYS  32-63        1
GPU5    SYS  SYS  SYS  SYS  NV4  X    NODE NODE SYS  32-63        1
GPU6    SYS  SYS  SYS  SYS  NODE NODE X    NV4  SYS  32-63        1
GPU7    SYS  SYS  SYS  SYS  NODE NODE NV4  X    SYS  32-63        1
NIC0    PIX  NODE NODE NODE SYS  SYS  SYS  SYS  X
";

struct EightGpus {
    node: GpuNode,
    uuids: Vec<String>,
    host: TestHost,
}

impl EightGpus {
    async fn start() -> Self {
        let host = host("8xH200");
        let source = host.source.clone().with_links(&parse_matrix(TOPOLOGY).unwrap()).unwrap();
        let uuids = source.gpus().iter().map(|gpu| gpu.uuid.clone()).collect();
        let node = GpuNode::start(source, &host.host, Duration::from_millis(1));
        node.offers(RESOURCE_GPU, 8, 8).await;
        node.offers(RESOURCE_CORE, 800, 800).await;
        Self { node, uuids, host }
    }

    /// The indices of the GPUs that a pod with this number of whole ones gets, or with half of one for 0.
    async fn gives(&self, name: &str, count: u32) -> Result<Vec<usize>, DeviceError> {
        let claims = if count == 0 { pod(name, 50) } else { pod_with(name, &[(RESOURCE_GPU, count)]) };
        let given = self.node.manager.prepare(&claims, "c").await?;
        let visible = &given.env["NVIDIA_VISIBLE_DEVICES"];
        let index = |uuid: &str| self.uuids.iter().position(|known| known == uuid).unwrap();
        let mut indices: Vec<usize> = visible.split(',').map(index).collect();
        indices.sort_unstable();
        Ok(indices)
    }

    fn ends(&self, name: &str) {
        self.node.manager.release(&PodUid(name.into()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn groups_of_gpus_follow_the_links_of_the_matrix() {
    let gpus = EightGpus::start().await;
    assert_eq!(gpus.gives("pair", 2).await.unwrap(), [0, 1], "a bridge is the fastest link");
    // A share breaks a pair, so that the next group is on the other processor.
    assert_eq!(gpus.gives("share", 0).await.unwrap(), [2]);
    gpus.node.offers(RESOURCE_GPU, 8, 7).await;
    assert_eq!(gpus.gives("four", 4).await.unwrap(), [4, 5, 6, 7], "no link between the processors");
    assert_eq!(gpus.gives("share 2", 0).await.unwrap(), [2], "shares are packed");
    assert_eq!(gpus.gives("single", 1).await.unwrap(), [3]);
    assert!(matches!(gpus.gives("none", 1).await, Err(DeviceError::Refused(_))));
    gpus.ends("four");
    assert_eq!(gpus.gives("again", 2).await.unwrap(), [4, 5]);
    assert_eq!(gpus.gives("again 2", 2).await.unwrap(), [6, 7]);
}

#[tokio::test(flavor = "multi_thread")]
async fn single_gpus_consume_fragments() {
    let gpus = EightGpus::start().await;
    assert_eq!(gpus.gives("first", 1).await.unwrap(), [0]);
    assert_eq!(gpus.gives("second", 1).await.unwrap(), [1], "the other half of the broken pair");
    assert_eq!(gpus.gives("four", 4).await.unwrap(), [4, 5, 6, 7]);
    assert_eq!(gpus.gives("pair", 2).await.unwrap(), [2, 3]);
    gpus.ends("second");
    gpus.ends("four");
    assert_eq!(gpus.gives("third", 1).await.unwrap(), [1], "the groups of the other processor stay whole");
    // With three GPUs one is left of a group of four, and a group of two stays for the next pod.
    assert_eq!(gpus.gives("three", 3).await.unwrap(), [4, 5, 6]);
    gpus.ends("pair");
    assert_eq!(gpus.gives("two", 2).await.unwrap(), [2, 3]);
}

/// The loss of a GPU while others are in use: its pair is not given, and the rest is.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_gpu_is_left_out_of_groups() {
    let gpus = EightGpus::start().await;
    gpus.host.sim.device(5).lost.store(15, std::sync::atomic::Ordering::Relaxed);
    gpus.node.offers(RESOURCE_GPU, 8, 7).await;
    assert_eq!(gpus.gives("four", 4).await.unwrap(), [0, 1, 2, 3]);
    assert_eq!(gpus.gives("pair", 2).await.unwrap(), [6, 7]);
    assert!(matches!(gpus.gives("two", 2).await, Err(DeviceError::Refused(_))), "only one is left");
    gpus.host.sim.device(5).lost.store(0, std::sync::atomic::Ordering::Relaxed);
    gpus.node.offers(RESOURCE_GPU, 8, 8).await;
    assert_eq!(gpus.gives("two", 2).await.unwrap(), [4, 5]);
}
