//! `temper bench comm`

use crate::args::{BenchComm, Transport};
use crate::backend::ranks_here;
use crate::exit::BadInput;
use crate::launch;
use crate::layout::of_engine;
use crate::out::{say, say_json, tell};
use crate::table::Table;
use serde::Serialize;
use std::sync::Arc;
use std::time::Duration;
use temper_cluster::Rendezvous;
use temper_comm::bench::{self, OPERATIONS};
use temper_comm::{Axes, Comm, HostWorld, Mesh, Operation, Tcp, World, tcp, threads};
use temper_cuda::nccl::NcclWorld;
use temper_cuda::{Cuda, Options};
use temper_monitor::size;
use temper_planner::LayoutRequest;
use temper_tensor::{Ops, cpu::Cpu};

/// Between processors, buffers this large already show the speed of large ones.
const MOST_ON_HOST: u64 = 256 << 20;
const MOST_ON_GPU: u64 = 4 << 30;

/// Starts the ranks, or is one of them.
pub fn run(args: &BenchComm) -> anyhow::Result<()> {
    if args.max.is_some_and(|max| max < args.min) {
        return Err(BadInput("--max is smaller than --min".into()).into());
    }
    let operations: Vec<Operation> = OPERATIONS.into_iter().filter(|o| o.name().contains(&args.only)).collect();
    if operations.is_empty() {
        let all: Vec<&str> = OPERATIONS.iter().map(|o| o.name()).collect();
        return Err(BadInput(format!("--only {}: no operation has such a name; they are {}", args.only, all.join(", "))).into());
    }
    let job = Job { args, operations };
    match (args.transport, args.ranks) {
        (Transport::Threads, ranks) => job.in_threads(ranks.unwrap_or(2).into()),
        (_, Some(ranks)) => {
            job.axes(ranks.into())?;
            launch::on_this_host(ranks.into(), || job.as_rank())
        }
        (_, None) => job.as_rank(),
    }
}

struct Job<'a> {
    args: &'a BenchComm,
    operations: Vec<Operation>,
}

/// A row of the table.
#[derive(Serialize)]
struct Row {
    axis: &'static str,
    ranks: usize,
    operation: &'static str,
    bytes: usize,
    us: f64,
    repeated: usize,
    algorithm_gb_per_s: f64,
    bus_gb_per_s: f64,
}

impl Job<'_> {
    /// The axes of the layout over `ranks` ranks.
    fn axes(&self, ranks: usize) -> anyhow::Result<Axes> {
        let text = self.args.layout.as_deref().unwrap_or_default();
        let origin = format!("--layout {text}");
        let asked = LayoutRequest::parse(text, &origin)?;
        let no_axes = [
            ("vpp", asked.vpp.is_some()),
            ("split", !asked.split.is_empty()),
            ("sequence", asked.sequence.is_some()),
            ("mb", asked.micro_batch.is_some()),
            ("recompute", asked.recompute.is_some()),
            ("offload", asked.offload.is_some()),
            ("auto", asked.auto),
        ];
        if let Some((key, _)) = no_axes.into_iter().find(|(_, given)| *given) {
            return Err(
                BadInput(format!("{origin}: {key} changes no group of ranks, and so nothing that is measured: leave it out")).into()
            );
        }
        // There is no model: whoever names the axes of experts has some.
        let has_experts = asked.ep.or(asked.etp).is_some();
        Ok(of_engine(&asked.over(Some(ranks), has_experts, &origin)?).axes)
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.args.patience.into())
    }

    fn in_threads(&self, ranks: usize) -> anyhow::Result<()> {
        self.axes(ranks)?;
        std::thread::scope(|scope| {
            let measure = |world: HostWorld| self.measure(&world, &Cpu::new(1), ranks).inspect_err(|e| world.give_up(&e.to_string()));
            let ranks: Vec<_> = threads(ranks, self.patience()).into_iter().map(|world| scope.spawn(move || measure(world))).collect();
            let results = ranks.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(anyhow::anyhow!("a rank panicked"))));
            results.collect::<Vec<_>>().into_iter().collect() // every rank ends before the first error is passed on
        })
    }

    fn as_rank(&self) -> anyhow::Result<()> {
        let found = Rendezvous::from_env().map_err(|e| BadInput(e.to_string()))?;
        let me = found.ok_or_else(|| {
            BadInput("one process is one rank: give --ranks N, or start it with mpirun, srun or RANK, WORLD_SIZE ...".into())
        })?;
        self.axes(me.size)?;
        let BenchComm { transport, layout, min, max, only, .. } = self.args;
        let fingerprint = format!("temper {} bench comm {transport:?} {layout:?} {min} {max:?} {only}", env!("CARGO_PKG_VERSION"));
        let job = format!("bench {}", me.master);
        let (rank, size, master) = (me.rank, me.size, me.master.as_str());
        let host = tcp(&Tcp { rank, size, master, job: &job, fingerprint: &fingerprint, announce: None, patience: self.patience() })?;
        let measured = match transport {
            Transport::Nccl => self.on_gpu(me.local_rank, &host),
            _ => self.measure(&host, &Cpu::new(1), ranks_here().unwrap_or(size)),
        };
        measured.inspect_err(|e| host.give_up(&e.to_string()))
    }

    fn on_gpu(&self, ordinal: usize, host: &HostWorld) -> anyhow::Result<()> {
        let gpu = Cuda::open(Options { ordinal, ..Options::default() })?;
        let world = NcclWorld::open(gpu.device(), host.clone())?;
        self.measure(&world, &gpu, 1)
    }

    /// Measures on one rank, of which `here` share the memory. Rank 0 prints.
    fn measure(&self, world: &dyn World, ops: &dyn Ops, here: usize) -> anyhow::Result<()> {
        let axes = self.axes(world.size())?;
        let mesh = Mesh::new(world, axes, &[])?;
        // The connections of a pipeline are groups of two neighbours each; collectives are measured over all its stages.
        let stages: Vec<usize> = (0..axes.pp).map(|stage| stage * axes.stage_ranks() + mesh.rank % axes.stage_ranks()).collect();
        let pipeline = world.group("stages of a pipeline", &stages)?;
        let room = -bench::slowest(&*mesh.world, ops, -(room(ops, here) as f64))? as usize; // of the rank with the least
        let speaks = world.rank() == 0;
        let mut all = vec![];
        for (axis, comm) in self.groups(&mesh, &pipeline) {
            let mut rows = vec![];
            for &operation in &self.operations {
                rows.extend(self.sizes(&mesh, axis, comm, ops, operation, room)?);
            }
            if speaks && !self.args.json {
                say(table(&rows))?;
            }
            all.extend(rows);
        }
        if speaks && self.args.json {
            say_json(&all)?;
        }
        Ok(mesh.world.barrier()?)
    }

    /// The groups to measure: those of the layout's axes, or everyone.
    fn groups<'m>(&self, mesh: &'m Mesh, pipeline: &'m Arc<dyn Comm>) -> Vec<(&'static str, &'m dyn Comm)> {
        let all: [(&'static str, &'m Arc<dyn Comm>); 6] = [
            ("tp", &mesh.tp),
            ("cp", &mesh.cp),
            ("ep x etp", &mesh.experts),
            ("dp x cp", &mesh.dp),
            ("expert dp", &mesh.expert_dp),
            ("pp", pipeline),
        ];
        if self.args.layout.is_none() {
            return vec![("all", &*mesh.world)];
        }
        all.into_iter().filter(|(_, comm)| comm.size() > 1).map(|(axis, comm)| (axis, &**comm)).collect()
    }

    /// One operation in all sizes, each four times the last.
    fn sizes(
        &self,
        mesh: &Mesh,
        axis: &'static str,
        comm: &dyn Comm,
        ops: &dyn Ops,
        operation: Operation,
        room: usize,
    ) -> anyhow::Result<Vec<Row>> {
        let most = self.args.max.unwrap_or(if ops.on_device() { MOST_ON_GPU } else { MOST_ON_HOST });
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let mut rows = vec![];
        let mut bytes = usize::try_from(self.args.min)?;
        while bytes <= most {
            let needed = bench::memory(operation, comm.size(), bytes);
            if needed > room {
                if mesh.rank == 0 {
                    tell(format_args!(
                        "note: {axis}: {} stops before {}: {} do not fit into memory",
                        operation.name(),
                        size(bytes as u64),
                        size(needed as u64)
                    ));
                }
                break;
            }
            let m = bench::measure(&*mesh.world, comm, ops, operation, bytes)?;
            rows.push(Row {
                axis,
                ranks: comm.size(),
                operation: operation.name(),
                bytes: m.bytes,
                us: m.seconds * 1e6,
                repeated: m.repeated,
                algorithm_gb_per_s: m.algorithm / 1e9,
                bus_gb_per_s: m.bus / 1e9,
            });
            bytes *= 4;
        }
        Ok(rows)
    }
}

/// Bytes that buffers may take on this rank.
fn room(ops: &dyn Ops, here: usize) -> usize {
    if ops.on_device() {
        // NCCL's own buffers take some GiB at most.
        let memory = ops.memory().unwrap_or_default();
        return memory.capacity.saturating_sub(memory.reserved).saturating_sub(4 << 30);
    }
    let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| {
        let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
        line.split_whitespace().next()?.parse::<usize>().ok()
    });
    // Messages on their way are copies of what is sent, at the sender and at the receiver.
    available.map_or(usize::MAX, |kib| (kib << 10) / here.max(1) / 4)
}

fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(&["operation", "ranks", "buffer", "time us", "algorithm GB/s", "bus GB/s", "axis"]);
    for r in rows {
        let number = |x: f64| if x < 10.0 { format!("{x:.3}") } else { format!("{x:.1}") };
        let (algorithm, bus) = (number(r.algorithm_gb_per_s), number(r.bus_gb_per_s));
        table.row([r.operation.into(), r.ranks.to_string(), size(r.bytes as u64), number(r.us), algorithm, bus, r.axis.into()]);
    }
    table
}
