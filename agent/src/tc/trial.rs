//! Tries what shaping needs of the kernel: in a network namespace made for it and gone afterwards, not by guessing.

use super::error::ShapeError;
use super::kernel::{Kernel, Refusal};
use super::plan::{self, Leaf, Paths};
use super::{Shape, restore};
use flexcomm_domain::{Bandwidth, Seconds};
use std::io;

/// What this kernel can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSupport {
    /// htb with our classes and filters: rates can be set.
    pub htb: bool,
    /// The u32 classifier, which keeps the controller's path out of the shaped class.
    pub u32: bool,
    /// netem: delay, jitter and loss can be set.
    pub netem: bool,
}

/// The loopback interface of a new namespace.
const LOOPBACK: u32 = 1;

/// Builds the tree that [`super::Shaper`] would build, in a namespace of its own. Needs CAP_SYS_ADMIN and
/// CAP_NET_ADMIN.
pub fn try_kernel() -> Result<KernelSupport, ShapeError> {
    // A thread of its own: its namespace ends with it, and nobody else's changes.
    let thread = std::thread::Builder::new().name("tc-trial".to_owned()).spawn(|| {
        nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNET)
            .map_err(|errno| ShapeError::io("make a network namespace")(errno.into()))?;
        attempt()
    });
    let thread = thread.map_err(ShapeError::io("start a thread"))?;
    thread.join().unwrap_or_else(|_| Err(ShapeError::io("try the kernel")(io::Error::other("the trial panicked"))))
}

fn attempt() -> Result<KernelSupport, ShapeError> {
    let mut kernel = Kernel::open()?;
    let fine = |e: flexcomm_domain::Invalid| ShapeError::Range { iface: "lo".to_owned(), source: e };
    let rate = Bandwidth::new(1e9).map_err(fine)?;
    let shape = Shape { delay: Seconds::new(1e-3).map_err(fine)?, ..Shape::rate_only(rate) };
    let paths = Paths { controller: Some(([127, 0, 0, 1], 1).into()), echo_port: 1 };
    let built = plan::build(LOOPBACK, &shape, Leaf::Fifo, paths);
    let first_of = |kind: &str| built.iter().position(|message| message.kind == kind);
    let (htb, u32) = match kernel.execute(&built) {
        Ok(()) => (true, true),
        Err(refusal) if unknown(&refusal) && Some(refusal.index) == first_of("htb") => (false, false),
        Err(refusal) if unknown(&refusal) && Some(refusal.index) == first_of("u32") => (true, false),
        Err(refusal) => return Err(restore::refused("build a tree on lo".to_owned(), refusal)),
    };
    // netem needs no htb: it is tried at the root when ours does not stand there.
    let netem =
        if htb { plan::change(LOOPBACK, &shape, Leaf::Netem) } else { vec![plan::netem_root(LOOPBACK, &shape)] };
    let netem = match kernel.execute(&netem) {
        Ok(()) => true,
        Err(refusal) if unknown(&refusal) => false,
        Err(refusal) => return Err(restore::refused("set netem on lo".to_owned(), refusal)),
    };
    Ok(KernelSupport { htb, u32, netem })
}

fn unknown(refusal: &Refusal) -> bool {
    refusal.errno() == libc::ENOENT
}
