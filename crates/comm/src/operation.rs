//! The names of operations: in messages, in errors, in the recorder.

/// What a rank does with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Operation {
    /// [`Comm::all_reduce`](crate::Comm::all_reduce).
    AllReduce,
    /// [`Comm::all_gather`](crate::Comm::all_gather).
    AllGather,
    /// [`Comm::reduce_scatter`](crate::Comm::reduce_scatter).
    ReduceScatter,
    /// [`Comm::all_to_all`](crate::Comm::all_to_all).
    AllToAll,
    /// [`Comm::broadcast`](crate::Comm::broadcast).
    Broadcast,
    /// [`Comm::send`](crate::Comm::send).
    Send,
    /// [`Comm::recv`](crate::Comm::recv).
    Recv,
    /// [`Comm::barrier`](crate::Comm::barrier).
    Barrier,
}

impl Operation {
    /// All of them, in the order of their codes.
    pub const ALL: [Operation; 8] = [
        Operation::AllReduce,
        Operation::AllGather,
        Operation::ReduceScatter,
        Operation::AllToAll,
        Operation::Broadcast,
        Operation::Send,
        Operation::Recv,
        Operation::Barrier,
    ];

    /// Its name in the contract.
    pub fn name(self) -> &'static str {
        match self {
            Operation::AllReduce => "all_reduce",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter => "reduce_scatter",
            Operation::AllToAll => "all_to_all",
            Operation::Broadcast => "broadcast",
            Operation::Send => "send",
            Operation::Recv => "recv",
            Operation::Barrier => "barrier",
        }
    }

    pub(crate) fn from_code(code: u8) -> Option<Operation> {
        Operation::ALL.get(usize::from(code)).copied()
    }
}
