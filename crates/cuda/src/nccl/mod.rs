//! Ranks that are GPUs: [`NcclWorld`], whose groups exchange through NCCL.
//!
//! Every group has a communicator and a stream of its own (`stream.rs`). An operation begins when the compute stream has come to where
//! it was called, and [`Pending::wait`](temper_comm::Pending::wait) puts what comes next on the compute stream behind it; the host
//! waits for neither. Handles being independent, a pipeline that sends forward on one and backward on the other cannot lock itself.
//!
//! A [`HostWorld`] beside it carries what starts and ends a job: NCCL's identifier, checks that all ranks make the same groups,
//! barriers, and the question where another rank stands. A watchdog (`watchdog.rs`) looks after every operation under way. When one
//! fails, or is not done within the world's patience, or a rank of its group is gone, it names the operation and the rank and aborts
//! all communicators, so that nothing waits for ever. From then on every call fails with that error, and **what the operations under
//! way have left in their buffers is garbage**: whoever is about to keep a result calls [`Comm::barrier`]
//! or waits for an operation first.
//!
//! Sums of 16-bit floats are rounded at every hop of NCCL's ring (of n ranks, n - 1 times), as in every program that uses NCCL;
//! gradients are summed in f32 for that reason.

mod communicator;
mod failure;
mod group;
mod lane;
mod stream;
mod watchdog;

use crate::device::Device;
use crate::sys::nccl::{Nccl, UniqueId};
use communicator::Communicator;
use group::NcclGroup;
use std::sync::Arc;
use temper_comm::{Comm, Error, HostWorld, Result, Solo, World};
use temper_tensor::{Tensor, View};
use watchdog::Watchdog;

/// Settings of a process that exchanges through NCCL, each unless the user has set it. Whoever starts workers gives them these; a
/// process that was started otherwise sets the first two itself, as long as it can.
///
/// - `NCCL_NVLS_ENABLE=0`: NVLink multicast can put the GPUs of a host out of service when a program that uses it is killed.
/// - `NCCL_P2P_DIRECT_DISABLE=1`: ranks of one process would read each other's tensors in place, but our arena maps its memory for its
///   own device only. Of no consequence with a process per GPU.
/// - `CUDA_DEVICE_MAX_CONNECTIONS=32`: with the usual 8 hardware queues, streams of independent groups wait for each other, which can
///   lock ranks.
pub const ENVIRONMENT: [(&str, &str); 3] =
    [("NCCL_NVLS_ENABLE", "0"), ("NCCL_P2P_DIRECT_DISABLE", "1"), ("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// What [`World::group`] needs of NCCL: `ncclCommSplit`.
const OLDEST: i32 = 21_800;

pub(crate) fn transport(e: impl std::fmt::Display) -> Error {
    Error::Transport(e.to_string())
}

/// All ranks of a job, each with a GPU of its own.
pub struct NcclWorld {
    host: HostWorld,
    device: Arc<Device>,
    /// None with one rank.
    root: Option<Root>,
}

struct Root {
    communicator: Arc<Communicator>,
    /// All ranks, through host memory.
    everyone: Arc<dyn Comm>,
    watchdog: Arc<Watchdog>,
}

impl NcclWorld {
    /// Joins this rank's GPU to those of the other ranks of `host`. All ranks call this.
    ///
    /// # Errors
    /// When NCCL is missing or too old, two ranks have different versions of it or the same GPU, or the GPUs do not get connected
    /// within the patience of `host`.
    pub fn open(device: &Arc<Device>, host: HostWorld) -> Result<NcclWorld> {
        let root = if host.size() > 1 { Some(Root::open(device, &host)?) } else { None };
        Ok(NcclWorld { host, device: device.clone(), root })
    }

    /// The world of the same ranks through host memory.
    pub fn host(&self) -> &HostWorld {
        &self.host
    }
}

impl Root {
    fn open(device: &Arc<Device>, host: &HostWorld) -> Result<Root> {
        communicator::prepare_environment();
        let everyone = host.group("nccl", &(0..host.size()).collect::<Vec<_>>())?;
        // Every rank comes this far, so that one without NCCL is an error on all ranks.
        let library = Nccl::load().and_then(|library| library.version().map(|version| (library, version)));
        check_versions(&*everyone, library.as_ref().map_or(0, |(_, version)| *version))?;
        let library = Arc::new(library.map_err(transport)?.0);
        check_devices(&*everyone, device.uuid().map_err(transport)?)?;
        let id = unique_id(&library, &*everyone)?;
        let communicator = Arc::new(Communicator::join(&library, device, id, host.size(), host.rank(), host.patience())?);
        tracing::info!(library = library.found.path, ranks = host.size(), rank = host.rank(), "joined the GPUs");
        let watchdog = Arc::new(Watchdog::start(host.clone(), &communicator).map_err(transport)?);
        Ok(Root { communicator, everyone, watchdog })
    }
}

/// `own` of all ranks, in their order.
fn gather<const N: usize>(everyone: &dyn Comm, own: [i32; N]) -> Result<Vec<[i32; N]>> {
    let n = everyone.size();
    let mut all = Tensor::from_vec(vec![0i32; n * N], &[n, N]);
    everyone.all_gather(all.view_mut(), View::host(&own, &[1, N]))?.wait()?;
    let all = all.as_slice::<i32>().unwrap_or_default();
    Ok(all.chunks_exact(N).filter_map(|row| row.try_into().ok()).collect())
}

fn check_versions(everyone: &dyn Comm, own: i32) -> Result<()> {
    let versions = gather(everyone, [own])?;
    let of = |rank: usize| match versions[rank][0] {
        0 => format!("rank {rank} has no NCCL (its log says why)"),
        v => format!("rank {rank} has NCCL {}.{}.{}", v / 10_000, v / 100 % 100, v % 100),
    };
    if let Some(old) = versions.iter().position(|[v]| *v < OLDEST) {
        let own = if own == 0 { Nccl::load().err().map(|e| format!(" ({e})")).unwrap_or_default() } else { String::new() };
        return Err(transport(format!("{}; every rank needs 2.18 or newer{own}", of(old))));
    }
    match versions.iter().position(|v| *v != versions[0]) {
        Some(other) => Err(transport(format!("{}, {}: install the same version on all hosts", of(0), of(other)))),
        None => Ok(()),
    }
}

fn check_devices(everyone: &dyn Comm, own: [u8; 16]) -> Result<()> {
    let word = |i: usize| i32::from_le_bytes([own[4 * i], own[4 * i + 1], own[4 * i + 2], own[4 * i + 3]]);
    let devices = gather(everyone, [word(0), word(1), word(2), word(3)])?;
    for (rank, device) in devices.iter().enumerate() {
        if let Some(first) = devices[..rank].iter().position(|d| d == device) {
            return Err(transport(format!(
                "ranks {first} and {rank} have the same GPU: each needs one of its own (see LOCAL_RANK and CUDA_VISIBLE_DEVICES)"
            )));
        }
    }
    Ok(())
}

/// Rank 0's identifier, on all ranks.
fn unique_id(library: &Nccl, everyone: &dyn Comm) -> Result<UniqueId> {
    let id = if everyone.rank() == 0 { communicator::new_id(library).map_err(transport) } else { Ok(UniqueId([0; 128])) };
    // Sent in any case: the others must not wait for a rank that failed here.
    let word = |c: &[u8]| i32::from_le_bytes([c[0], c[1], c[2], c[3]]);
    let words: Vec<i32> = id.as_ref().map_or(vec![0; 32], |id| id.0.chunks_exact(4).map(word).collect());
    let mut x = Tensor::from_vec(words, &[32]);
    everyone.broadcast(x.view_mut(), 0)?.wait()?;
    id?;
    let mut bytes = [0; 128];
    for (to, word) in bytes.chunks_exact_mut(4).zip(x.as_slice::<i32>().unwrap_or_default()) {
        to.copy_from_slice(&word.to_le_bytes());
    }
    if bytes == [0; 128] { Err(transport("rank 0 could not start NCCL: its log says why")) } else { Ok(UniqueId(bytes)) }
}

/// A number that differs between names; enough to find ranks that make different groups.
fn digest(name: &str) -> i32 {
    name.bytes().fold(0x811c_9dc5_u32, |h, b| (h ^ u32::from(b)).wrapping_mul(0x0100_0193)) as i32 // FNV-1a, 32 bit
}

impl World for NcclWorld {
    fn host_group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>> {
        self.host.group(name, members)
    }

    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    fn group(&self, name: &str, members: &[usize]) -> Result<Arc<dyn Comm>> {
        let host = self.host.group(name, members)?; // checks the members
        let Some(root) = &self.root else { return Ok(Arc::new(Solo)) };
        root.watchdog.failure().check()?;
        let names = gather(&*root.everyone, [digest(name)])?;
        if let Some(from) = names.iter().position(|other| *other != [digest(name)]) {
            let place = format!("rank {}, making group {name} (ranks {members:?})", self.rank());
            return Err(Error::Mismatch { place, from, found: "it makes another group".into() });
        }
        let color = (members.len() > 1).then_some(members[0]);
        let split = root.communicator.split(color, host.rank(), self.host.patience(), name)?;
        let Some(communicator) = split else { return Ok(Arc::new(Solo)) };
        Ok(Arc::new(NcclGroup::new(name, members, host, communicator, &self.device, &root.watchdog)?))
    }
}
