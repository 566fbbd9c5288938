//! Connections whose handshake is not done: bounded, and nobody can take all places.

use crate::edge::echo::lock;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::Mutex;

/// Connections that may be in their handshake at once.
const MAX_PENDING: usize = 64;
/// Of these from one address: the streams of a session and its control connection, and some more.
const MAX_PER_SOURCE: usize = 24;

/// The connections that have not shown the token yet, oldest first. A new one always gets a place: the oldest of
/// its own source goes when that has many, else, when all are taken, the oldest of the source that has the most.
#[derive(Default)]
pub(super) struct Pending {
    places: Mutex<Places>,
}

#[derive(Default)]
struct Places {
    next: u64,
    taken: Vec<Place>,
}

struct Place {
    id: u64,
    source: IpAddr,
    socket: TcpStream,
}

impl Pending {
    /// Gives a connection a place, by a second handle of its socket. Another may be closed for it.
    pub(super) fn enter(&self, peer: SocketAddr, socket: TcpStream) -> u64 {
        let source = peer.ip().to_canonical();
        let mut places = lock(&self.places);
        let sources: Vec<IpAddr> = places.taken.iter().map(|place| place.source).collect();
        if let Some(victim) = victim(&sources, source) {
            let place = places.taken.remove(victim);
            // Its thread reads the end of the connection. One that is closed already needs nothing more.
            let _ = place.socket.shutdown(Shutdown::Both);
            tracing::debug!(source = %place.source, "throughput server closed a silent connection to make room");
        }
        let id = places.next;
        places.next += 1;
        places.taken.push(Place { id, source, socket });
        id
    }

    /// The handshake is over, well or not.
    pub(super) fn leave(&self, id: u64) {
        lock(&self.places).taken.retain(|place| place.id != id);
    }
}

/// Who must go before a connection from `source` may stay; `taken` is oldest first.
fn victim(taken: &[IpAddr], source: IpAddr) -> Option<usize> {
    let of = |source: IpAddr| taken.iter().filter(|other| **other == source).count();
    let from = if of(source) >= MAX_PER_SOURCE {
        source
    } else if taken.len() >= MAX_PENDING {
        *taken.iter().max_by_key(|source| of(**source))?
    } else {
        return None;
    };
    taken.iter().position(|other| *other == from)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(i: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, i])
    }

    #[test]
    fn there_is_room_for_many() {
        let taken: Vec<IpAddr> = (0..MAX_PENDING as u8 - 1).map(ip).collect();
        assert_eq!(victim(&taken, ip(200)), None);
        assert_eq!(victim(&vec![ip(1); MAX_PER_SOURCE - 1], ip(1)), None);
    }

    #[test]
    fn a_source_with_many_pays_for_itself() {
        let mut taken = vec![ip(1)];
        taken.extend(vec![ip(2); MAX_PER_SOURCE]);
        assert_eq!(victim(&taken, ip(2)), Some(1));
        assert_eq!(victim(&taken, ip(3)), None);
    }

    #[test]
    fn when_all_is_taken_the_greediest_pays() {
        let mut taken: Vec<IpAddr> = (0..MAX_PENDING as u8 - 3).map(|i| ip(100 + i)).collect();
        taken.extend([ip(2), ip(2), ip(2)]);
        assert_eq!(victim(&taken, ip(1)), Some(MAX_PENDING - 3));
    }
}
