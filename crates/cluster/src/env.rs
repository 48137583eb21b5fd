//! [`Rendezvous`]: rank, number of ranks, place on the host and address of rank 0, from the environment that a launcher gives.
//!
//! Four families of variables are understood: `RANK`, `WORLD_SIZE` and so on (torchrun, Kubernetes operators, temper's own supervisor),
//! Open MPI's `OMPI_*`, `PMI_*` of MPICH and its kin, and Slurm's. Launchers start each other (mpirun within a Slurm step, a supervisor
//! per node under srun), so several may be set: the innermost, which started the most processes, counts, in the order above.

/// Result of this module.
pub type Result<T> = std::result::Result<T, Error>;

/// The environment does not say, or not without contradiction, what this process is. The text names the variables.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Error(String);

/// What this process is among those of its job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendezvous {
    /// This process, from 0.
    pub rank: usize,
    /// Processes of the job.
    pub size: usize,
    /// This process among those of its host, from 0: the number of its GPU.
    pub local_rank: usize,
    /// Where rank 0 listens, `host:port`.
    pub master: String,
}

/// Everything that is read. A launcher that gives its workers one family removes the others.
pub const VARIABLES: [&str; 22] = [
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_NUM_NODES",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
];

/// The port of rank 0 where nothing names one; torchrun's.
const PORT: u16 = 29_500;

/// What a launcher says of a process.
struct Place {
    /// The variables of rank and size, for messages.
    names: (&'static str, &'static str),
    rank: usize,
    size: usize,
    local_rank: usize,
    /// All processes are on this host.
    one_host: bool,
    host: Option<String>,
    port: Option<u16>,
}

/// Variables, by name.
struct Vars<F>(F);

impl<F: Fn(&str) -> Option<String>> Vars<F> {
    /// An empty variable counts as unset.
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|v| v.trim().to_string()).filter(|v| !v.is_empty())
    }

    fn number(&self, name: &str) -> Result<Option<usize>> {
        let Some(text) = self.text(name) else { return Ok(None) };
        text.parse().map(Some).map_err(|_| Error(format!("{name}={text} is no whole number")))
    }

    fn needed(&self, name: &str, because: &str) -> Result<usize> {
        self.number(name)?.ok_or_else(|| Error(format!("{because} is set, but {name} is not: set both, or neither")))
    }

    /// Rank and size, when either is set.
    fn pair(&self, rank: &'static str, size: &'static str) -> Result<Option<(usize, usize)>> {
        if self.text(rank).is_none() && self.text(size).is_none() {
            return Ok(None);
        }
        let (r, s) = (self.needed(rank, size)?, self.needed(size, rank)?);
        if r < s { Ok(Some((r, s))) } else { Err(Error(format!("{rank}={r}, but {size}={s}: ranks count from 0"))) }
    }

    /// `RANK` and so on.
    fn plain(&self) -> Result<Option<Place>> {
        let names = ("RANK", "WORLD_SIZE");
        let Some((rank, size)) = self.pair(names.0, names.1)? else { return Ok(None) };
        let local_rank = match self.number("LOCAL_RANK")? {
            Some(local) => local,
            None if size == 1 => 0,
            None => return Err(Error("RANK and WORLD_SIZE are set, but LOCAL_RANK (this process among those of its host) is not".into())),
        };
        Ok(Some(Place { names, rank, size, local_rank, one_host: size == 1, host: None, port: None }))
    }

    fn open_mpi(&self) -> Result<Option<Place>> {
        self.mpi(("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
    }

    fn pmi(&self) -> Result<Option<Place>> {
        self.mpi(("PMI_RANK", "PMI_SIZE"), "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    }

    fn mpi(&self, names: (&'static str, &'static str), local_rank: &str, local_size: &str) -> Result<Option<Place>> {
        let Some((rank, size)) = self.pair(names.0, names.1)? else { return Ok(None) };
        let one_host = size == 1 || self.number(local_size)? == Some(size);
        let local = match self.number(local_rank)?.or(self.number("SLURM_LOCALID")?) {
            Some(local) => local,
            None if one_host => rank,
            None => return Err(Error(format!("{} is set, but {local_rank} is not: set LOCAL_RANK, RANK and WORLD_SIZE", names.0))),
        };
        let host = self.slurm_first_host()?;
        Ok(Some(Place { names, rank, size, local_rank: local, one_host, host, port: self.slurm_port()? }))
    }

    /// Within a step only: a batch script has rank 0 whatever it starts.
    fn slurm(&self) -> Result<Option<Place>> {
        if self.text("SLURM_STEP_ID").is_none() {
            return Ok(None);
        }
        let tasks = if self.text("SLURM_STEP_NUM_TASKS").is_some() { "SLURM_STEP_NUM_TASKS" } else { "SLURM_NTASKS" };
        let names = ("SLURM_PROCID", tasks);
        let Some((rank, size)) = self.pair(names.0, names.1)? else { return Ok(None) };
        let one_host = size == 1 || self.number("SLURM_STEP_NUM_NODES")? == Some(1);
        let local_rank = self.needed("SLURM_LOCALID", names.0)?;
        Ok(Some(Place { names, rank, size, local_rank, one_host, host: self.slurm_first_host()?, port: self.slurm_port()? }))
    }

    fn slurm_first_host(&self) -> Result<Option<String>> {
        for name in ["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"] {
            if let Some(list) = self.text(name) {
                let first = first_host(&list).ok_or_else(|| Error(format!("{name}={list} is no list of hosts")))?;
                return Ok(Some(first));
            }
        }
        Ok(None)
    }

    /// Jobs that share a host get different ports.
    fn slurm_port(&self) -> Result<Option<u16>> {
        Ok(self.number("SLURM_JOB_ID")?.map(|id| 15_000 + (id % 15_000) as u16))
    }

    /// The address of rank 0: as the user set it, else as the launcher knows it.
    fn master(&self, place: &Place) -> Result<String> {
        let port = match self.number("MASTER_PORT")? {
            Some(port) => Some(u16::try_from(port).ok().filter(|p| *p > 0).ok_or_else(|| Error(format!("MASTER_PORT={port} is no port")))?),
            None => None,
        };
        let (rank, size) = place.names;
        let host = match (self.text("MASTER_ADDR"), port) {
            (Some(host), Some(_)) => host,
            (Some(host), None) if place.port.is_some() => host,
            (Some(host), None) => return Err(Error(format!("MASTER_ADDR={host} is set, but MASTER_PORT is not: set both, or neither"))),
            (None, Some(port)) if rank == "RANK" && !place.one_host => {
                return Err(Error(format!("MASTER_PORT={port} is set, but MASTER_ADDR is not: set both, or neither")));
            }
            (None, _) if place.one_host => "127.0.0.1".into(),
            (None, _) => place.host.clone().ok_or_else(|| {
                Error(format!("{rank} and {size} are set, but nothing says where rank 0 is: set MASTER_ADDR and MASTER_PORT"))
            })?,
        };
        let port = port.or(place.port).unwrap_or(PORT);
        Ok(if host.contains(':') && !host.starts_with('[') { format!("[{host}]:{port}") } else { format!("{host}:{port}") })
    }
}

/// The first of a list like `gpu[07-12,20],login`.
fn first_host(list: &str) -> Option<String> {
    let mut host = String::new();
    let mut rest = list;
    while let Some(at) = rest.find(['[', ',']) {
        host += &rest[..at];
        if rest[at..].starts_with(',') {
            rest = "";
            break;
        }
        let (inside, after) = rest[at + 1..].split_once(']')?;
        host += inside.split([',', '-']).next()?;
        rest = after;
    }
    host += rest;
    (!host.is_empty()).then_some(host)
}

impl Rendezvous {
    /// From the environment of this process; `None` when it was started by itself.
    ///
    /// # Errors
    /// When variables are set by halves, are no numbers, or contradict each other: the text names them.
    pub fn from_env() -> Result<Option<Rendezvous>> {
        Rendezvous::from_vars(|name| std::env::var(name).ok())
    }

    /// From variables of any origin; errors as [`Rendezvous::from_env`].
    pub fn from_vars(vars: impl Fn(&str) -> Option<String>) -> Result<Option<Rendezvous>> {
        let vars = Vars(vars);
        let places: Vec<Place> = [vars.plain()?, vars.open_mpi()?, vars.pmi()?, vars.slurm()?].into_iter().flatten().collect();
        let Some((place, outer)) = places.split_first() else {
            return match ["LOCAL_RANK"].into_iter().find(|name| vars.text(name).is_some()) {
                Some(name) => Err(Error(format!("{name} is set, but RANK and WORLD_SIZE are not"))),
                None => Ok(None),
            };
        };
        for other in outer {
            let told = |p: &Place| format!("{}={} of {}={}", p.names.0, p.rank, p.names.1, p.size);
            if other.size > place.size || (other.size == place.size && other.rank != place.rank) {
                let what = format!("{} and {} contradict each other", told(place), told(other));
                return Err(Error(format!("{what}: unset those that do not belong to this start")));
            }
        }
        let master = vars.master(place)?;
        Ok(Some(Rendezvous { rank: place.rank, size: place.size, local_rank: place.local_rank, master }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from(vars: &str) -> Result<Option<Rendezvous>> {
        Rendezvous::from_vars(|name| vars.split_whitespace().find_map(|v| v.strip_prefix(name)?.strip_prefix('=').map(str::to_string)))
    }

    fn is(vars: &str, rank: usize, size: usize, local_rank: usize, master: &str) {
        assert_eq!(from(vars), Ok(Some(Rendezvous { rank, size, local_rank, master: master.into() })), "{vars}");
    }

    fn error(vars: &str, words: &[&str]) {
        let text = from(vars).unwrap_err().to_string();
        assert!(words.iter().all(|w| text.contains(w)), "{vars}: {text}");
    }

    #[test]
    fn every_family_is_understood() {
        assert_eq!(from("PATH=/bin"), Ok(None));
        is("RANK=5 WORLD_SIZE=16 LOCAL_RANK=1 MASTER_ADDR=10.0.0.1 MASTER_PORT=29501", 5, 16, 1, "10.0.0.1:29501");
        is("RANK=0 WORLD_SIZE=1", 0, 1, 0, "127.0.0.1:29500");
        is("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=fd00::1 MASTER_PORT=5", 1, 2, 1, "[fd00::1]:5");
        let slurm = "SLURM_JOB_ID=30042 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=gpu[07-12,20],login SLURM_STEP_NUM_NODES=8";
        is(&format!("{slurm} SLURM_PROCID=9 SLURM_STEP_NUM_TASKS=16 SLURM_LOCALID=1"), 9, 16, 1, "gpu07:15042");
        is(&format!("{slurm} SLURM_PROCID=9 SLURM_NTASKS=16 SLURM_LOCALID=1 MASTER_PORT=7"), 9, 16, 1, "gpu07:7");
        let ompi = "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=3";
        is(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=4"), 3, 4, 3, "127.0.0.1:29500");
        is(&format!("{ompi} OMPI_COMM_WORLD_LOCAL_SIZE=2 MASTER_ADDR=a MASTER_PORT=8"), 3, 4, 3, "a:8");
        is("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2", 1, 2, 1, "127.0.0.1:29500");
    }

    /// A batch script is no step; mpirun and a supervisor under srun are the inner launchers.
    #[test]
    fn the_innermost_launcher_counts() {
        assert_eq!(from("SLURM_JOB_ID=1 SLURM_PROCID=0 SLURM_NTASKS=16 SLURM_LOCALID=0 SLURM_JOB_NODELIST=a[1-2]"), Ok(None));
        let step = "SLURM_JOB_ID=1 SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a[1-2]";
        is(&format!("{step} RANK=9 WORLD_SIZE=16 LOCAL_RANK=1 MASTER_ADDR=b MASTER_PORT=3"), 9, 16, 1, "b:3");
        is(&format!("{step} OMPI_COMM_WORLD_RANK=9 OMPI_COMM_WORLD_SIZE=16 OMPI_COMM_WORLD_LOCAL_RANK=1"), 9, 16, 1, "a1:15001");
        is(&format!("{step} PMI_RANK=1 PMI_SIZE=2"), 1, 2, 0, "a1:15001");
    }

    #[test]
    fn halves_and_contradictions_name_the_variables() {
        error("RANK=1", &["RANK", "WORLD_SIZE is not"]);
        error("WORLD_SIZE=1", &["WORLD_SIZE", "RANK is not"]);
        error("LOCAL_RANK=1", &["LOCAL_RANK", "RANK and WORLD_SIZE are not"]);
        error("RANK=1 WORLD_SIZE=2", &["LOCAL_RANK"]);
        error("RANK=2 WORLD_SIZE=2 LOCAL_RANK=0", &["RANK=2", "WORLD_SIZE=2"]);
        error("RANK=one WORLD_SIZE=2", &["RANK=one", "whole number"]);
        error("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1", &["MASTER_ADDR and MASTER_PORT"]);
        error("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a", &["MASTER_PORT is not"]);
        error("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_PORT=4", &["MASTER_ADDR is not"]);
        error("RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=70000", &["MASTER_PORT=70000"]);
        error("PMI_RANK=1 PMI_SIZE=4", &["PMI_RANK", "MPI_LOCALRANKID"]);
        error("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_STEP_NODELIST=a[1", &["SLURM_LOCALID"]);
        error("SLURM_STEP_ID=0 SLURM_PROCID=1 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_STEP_NODELIST=a[1", &["SLURM_STEP_NODELIST=a[1"]);
        let rank = "RANK=1 WORLD_SIZE=4 LOCAL_RANK=1 MASTER_ADDR=a MASTER_PORT=3";
        error(&format!("{rank} PMI_RANK=2 PMI_SIZE=4 MPI_LOCALRANKID=0"), &["RANK=1", "PMI_RANK=2"]);
        error(&format!("{rank} PMI_RANK=1 PMI_SIZE=8 MPI_LOCALRANKID=0"), &["WORLD_SIZE=4", "PMI_SIZE=8"]);
    }

    #[test]
    fn lists_of_hosts() {
        for (list, first) in [("a", "a"), ("a,b", "a"), ("a[3]", "a3"), ("n[1-2]x[04,07]-ib,z", "n1x04-ib"), ("a-1,b", "a-1")] {
            assert_eq!(first_host(list).as_deref(), Some(first));
        }
        assert_eq!(first_host("a[1"), None);
        assert_eq!(first_host(""), None);
    }
}
