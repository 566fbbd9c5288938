//! The shaper: checks, journals, starts the guardian, changes, and undoes its own change when it fails half-way.

use super::codec::{self, Message};
use super::error::ShapeError;
use super::guardian::{Orders, Watch};
use super::journal::{self, Before, Journal, Place};
use super::kernel::{Kernel, Link, Refusal};
use super::plan::{self, Leaf, Paths, Root, Tree};
use super::{Shape, TcConfig, restore};
use crate::lock::Lock;
use std::collections::BTreeMap;
use std::time::Duration;

/// Shorter leases would run out under load, longer ones leave a hung agent's link shaped for too long.
const LEASES: std::ops::RangeInclusive<Duration> = Duration::from_millis(200)..=Duration::from_secs(3600);
/// `IFNAMSIZ` without the NUL.
const MOST_NAME_BYTES: usize = 15;

/// Shapes interfaces of the calling thread's network namespace and keeps the lease.
///
/// Blocking: a few milliseconds a call, the first change some 20 ms more to start the guardian. In async code call
/// it by `spawn_blocking` or from a thread of its own. Dropping it puts every link back.
#[derive(Debug)]
pub struct Shaper {
    config: TcConfig,
    /// Names this shaper in journals: only its own guardian puts its links back.
    owner: String,
    /// The owner's lock, from the first change on.
    lock: Option<Lock>,
    watch: Watch,
    /// What is in force, by interface.
    shapes: BTreeMap<String, Shape>,
}

impl Shaper {
    /// Checks the lease; touches nothing yet.
    pub fn new(config: TcConfig) -> Result<Self, ShapeError> {
        if !LEASES.contains(&config.lease) {
            return Err(ShapeError::Lease { lease: config.lease });
        }
        let owner = format!("{:032x}", rand::random::<u128>());
        Ok(Self { config, owner, lock: None, watch: Watch::default(), shapes: BTreeMap::new() })
    }

    /// Applies a shape, or changes the one in force in place. An error leaves the link as it was before the call,
    /// or unshaped when even that failed.
    pub fn apply(&mut self, iface: &str, shape: &Shape) -> Result<(), ShapeError> {
        self.admit(iface, shape)?;
        let mut kernel = Kernel::open()?;
        let link = self.find(&mut kernel, iface)?;
        self.own()?;
        let outcome = {
            let _section = restore::enter(&self.config.state_dir)?;
            let target = Target { iface, link, shape };
            let tree = kernel.tree(link.ifindex).map_err(look(iface))?;
            match tree.root.clone() {
                Root::Ours => self.change(&mut kernel, target, &tree),
                root => self.build(&mut kernel, target, root),
            }
        };
        if outcome.is_ok() {
            self.shapes.insert(iface.to_owned(), *shape);
        }
        if self.shapes.is_empty() {
            self.stand_down();
        }
        outcome?;
        // The guardian may have given up on us meanwhile (this process was stopped, say).
        self.renew()
    }

    /// Renews the lease; call it every third of the lease. A guardian that was killed is replaced. After
    /// [`ShapeError::LeaseLost`] the links are as they were before; apply again.
    pub fn renew(&mut self) -> Result<(), ShapeError> {
        if self.shapes.is_empty() {
            return Ok(());
        }
        if self.watch.renew() {
            return Ok(());
        }
        let lost = self.put_back_by_others()?;
        if !lost.is_empty() {
            // Half a lease is none: what is left goes too, and the caller starts over.
            self.restore()?;
            return Err(ShapeError::LeaseLost { ifaces: lost });
        }
        self.fill()
    }

    /// Puts every link back. Doing it again is fine.
    pub fn restore(&mut self) -> Result<(), ShapeError> {
        if self.lock.is_none() {
            return Ok(());
        }
        // On an error the guardian stays: it goes on trying when this process ends or its lease does.
        let section = restore::enter(&self.config.state_dir)?;
        restore::put_back_of(&self.config.state_dir, &self.owner, &section)?;
        drop(section);
        self.shapes.clear();
        self.stand_down();
        Ok(())
    }

    /// What is in force on an interface.
    pub fn in_force(&self, iface: &str) -> Option<&Shape> {
        self.shapes.get(iface)
    }

    /// What the configuration alone decides.
    fn admit(&self, iface: &str, shape: &Shape) -> Result<(), ShapeError> {
        let iface = iface.to_owned();
        if !self.config.allow {
            return Err(ShapeError::NotAllowed { iface });
        }
        if !self.config.interfaces.contains(&iface) {
            return Err(ShapeError::NotListed { iface, allowed: self.config.interfaces.clone() });
        }
        shape.check().map_err(|source| ShapeError::Range { iface, source })
    }

    fn find(&self, kernel: &mut Kernel, iface: &str) -> Result<Link, ShapeError> {
        let unknown = || ShapeError::UnknownInterface { iface: iface.to_owned() };
        if iface.is_empty() || iface.len() > MOST_NAME_BYTES || iface.contains('/') {
            return Err(unknown());
        }
        let ifindex = nix::net::if_::if_nametoindex(iface).map_err(|_| unknown())?;
        let link = kernel.link(ifindex).map_err(look(iface))?.ok_or_else(unknown)?;
        if !self.config.allow_default_route {
            let routes = kernel.default_routes().map_err(ShapeError::io("read the routes"))?;
            if routes.contains(&ifindex) {
                return Err(ShapeError::DefaultRoute { iface: iface.to_owned() });
            }
        }
        Ok(link)
    }

    /// Takes the state directory, and puts back first what an earlier owner left in it.
    fn own(&mut self) -> Result<(), ShapeError> {
        if self.lock.is_none() {
            let lock = restore::own(&self.config.state_dir)?;
            let recovered = restore::recover_owned(&self.config.state_dir)?;
            for why in &recovered.rejected {
                tracing::warn!("tc journal rejected: {why}");
            }
            self.lock = Some(lock);
        }
        Ok(())
    }

    /// In place: classes and queues keep what they hold.
    fn change(&mut self, kernel: &mut Kernel, target: Target<'_>, tree: &Tree) -> Result<(), ShapeError> {
        let Target { iface, link, shape } = target;
        let journal = journal::read(&journal::path(&self.config.state_dir, iface))?;
        let Some(journal) = journal.filter(|j| j.owner == self.owner && j.ifindex == link.ifindex) else {
            return Err(foreign(iface, "htb", plan::OURS));
        };
        let leaf = match tree.netem {
            true => Leaf::Netem,
            false if shape.needs_netem() => leaf(kernel, target, plan::BULK)?,
            false => Leaf::Fifo,
        };
        self.guard()?;
        let messages = plan::change(link.ifindex, shape, leaf);
        let Err(refusal) = kernel.execute(&messages) else { return Ok(()) };
        let error = explain(iface, &messages, refusal);
        let before = self.shapes.get(iface).map(|old| plan::change(link.ifindex, old, leaf));
        if before.is_none_or(|messages| kernel.execute(&messages).is_err()) {
            self.shapes.remove(iface);
            self.give_up(kernel, &journal)?;
        }
        Err(error)
    }

    /// Guardian, journal, then the whole tree in one system call.
    fn build(&mut self, kernel: &mut Kernel, target: Target<'_>, root: Root) -> Result<(), ShapeError> {
        let Target { iface, link, shape } = target;
        self.shapes.remove(iface);
        // Somebody took our tree away: what the journal says is no longer what a restore should bring. One that
        // cannot be read may be all that is known about this interface: it is not written over.
        if let Some(journal) = journal::read(&journal::path(&self.config.state_dir, iface))? {
            self.give_up(kernel, &journal)?;
        }
        let before = before(iface, root)?;
        ask(kernel, target, ("htb", "sch_htb"), codec::ROOT)?;
        let leaf = leaf(kernel, target, codec::ROOT)?;
        let journal = Journal::new(Place::here()?, link, iface, &self.owner, before);
        self.guard()?;
        journal::write(&self.config.state_dir, &journal)?;
        let paths = Paths { controller: self.config.controller, echo_port: self.config.echo_port };
        let messages = plan::build(link.ifindex, shape, leaf, paths);
        let built = self.guard().and_then(|()| kernel.execute(&messages).map_err(|r| explain(iface, &messages, r)));
        if built.is_err() {
            self.give_up(kernel, &journal)?;
        }
        built
    }

    fn give_up(&self, kernel: &mut Kernel, journal: &Journal) -> Result<(), ShapeError> {
        restore::put_back(kernel, journal)?;
        journal::remove(&self.config.state_dir, &journal::path(&self.config.state_dir, &journal.iface))
    }

    /// Sees to it that guardians watch.
    fn guard(&mut self) -> Result<(), ShapeError> {
        if self.watch.renew() { Ok(()) } else { self.fill() }
    }

    /// Starts the guardians that are missing.
    fn fill(&mut self) -> Result<(), ShapeError> {
        let orders = Orders {
            state_dir: std::path::absolute(&self.config.state_dir)
                .map_err(ShapeError::io(format!("find {}", self.config.state_dir.display())))?,
            owner: self.owner.clone(),
            lease_ms: self.config.lease.as_millis() as u64,
        };
        self.watch.fill(&self.config.guardian, &orders)
    }

    /// Interfaces we shaped whose journal is gone: the guardian put them back before it ended.
    fn put_back_by_others(&self) -> Result<Vec<String>, ShapeError> {
        let _section = restore::enter(&self.config.state_dir)?;
        let mut lost = Vec::new();
        for iface in self.shapes.keys() {
            let journal = journal::read(&journal::path(&self.config.state_dir, iface))?;
            if journal.is_none_or(|journal| journal.owner != self.owner) {
                lost.push(iface.clone());
            }
        }
        Ok(lost)
    }

    /// Nothing is shaped: no guardian, and the state directory is free for others.
    fn stand_down(&mut self) {
        self.watch.quit();
        self.lock = None;
    }
}

impl Drop for Shaper {
    fn drop(&mut self) {
        if let Err(error) = self.restore() {
            tracing::error!("failed to {error}; the guardian goes on trying");
        }
    }
}

/// What a change is about.
#[derive(Debug, Clone, Copy)]
struct Target<'a> {
    iface: &'a str,
    link: Link,
    shape: &'a Shape,
}

fn look(iface: &str) -> impl FnOnce(std::io::Error) -> ShapeError {
    ShapeError::io(format!("look at {iface}"))
}

fn foreign(iface: &str, kind: &str, handle: u32) -> ShapeError {
    ShapeError::ForeignQdisc { iface: iface.to_owned(), kind: kind.to_owned(), handle: codec::handle_text(handle) }
}

/// What to journal about a root, or why it is left alone.
fn before(iface: &str, root: Root) -> Result<Before, ShapeError> {
    match root {
        Root::Default(kind) => Ok(Before::Default { kind }),
        Root::Foreign { kind, handle, options } if matches!(kind.as_str(), "pfifo" | "bfifo") => {
            Ok(Before::Fifo { kind, handle, options: hex::encode(options) })
        }
        Root::Foreign { kind, handle, .. } => Err(foreign(iface, &kind, handle)),
        Root::Ours => Err(foreign(iface, "htb", plan::OURS)),
    }
}

/// netem where the kernel has it, since later changes then happen in place; else a plain queue, if that will do.
fn leaf(kernel: &mut Kernel, target: Target<'_>, parent: u32) -> Result<Leaf, ShapeError> {
    match ask(kernel, target, ("netem", "sch_netem"), parent) {
        Ok(()) => Ok(Leaf::Netem),
        Err(ShapeError::MissingModule { .. }) if !target.shape.needs_netem() => Ok(Leaf::Fifo),
        Err(error) => Err(error),
    }
}

/// Asks the kernel for a kind of qdisc without changing anything; see [`plan::probe`].
fn ask(kernel: &mut Kernel, target: Target<'_>, kind: (&str, &'static str), parent: u32) -> Result<(), ShapeError> {
    let (kind, module) = kind;
    let iface = target.iface.to_owned();
    match kernel.execute(&[plan::probe(target.link.ifindex, kind, parent)]) {
        Err(refusal) if refusal.errno() == libc::EINVAL => Ok(()),
        Err(refusal) if refusal.errno() == libc::ENOENT => Err(ShapeError::MissingModule { iface, module }),
        Err(refusal) if refusal.errno() == libc::EPERM => Err(ShapeError::MissingCapability { iface }),
        Err(refusal) => Err(restore::refused(format!("ask the kernel for {kind} on {iface}"), refusal)),
        Ok(()) => Err(ShapeError::Io {
            operation: format!("ask the kernel for {kind} on {iface}"),
            source: std::io::Error::other("it took a qdisc without parameters; look with `tc qdisc show`"),
        }),
    }
}

/// Names the step, and what is missing when that is clear.
fn explain(iface: &str, messages: &[Message], refusal: Refusal) -> ShapeError {
    let iface = iface.to_owned();
    let Some(message) = messages.get(refusal.index) else {
        return restore::refused(format!("shape {iface}"), refusal);
    };
    match (refusal.errno(), message.kind.as_str()) {
        (libc::EPERM, _) => ShapeError::MissingCapability { iface },
        (libc::ENODEV, _) => ShapeError::UnknownInterface { iface },
        (libc::ENOENT, "u32") => ShapeError::MissingModule { iface, module: "cls_u32" },
        (libc::ENOENT, "netem") => ShapeError::MissingModule { iface, module: "sch_netem" },
        (_, kind) => {
            let handle = codec::handle_text(if message.handle == 0 { message.parent } else { message.handle });
            restore::refused(format!("shape {iface}: set {kind} {handle}"), refusal)
        }
    }
}
