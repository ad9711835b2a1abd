-- The worker's database, version 1.
--
-- `log` is the truth: append-only, one record per operation, each with the images of the rows it wrote and a checksum
-- chained to the record before it. Every other table is (key, body as JSON) and follows from the log; the generated
-- columns exist for indexes and for people who write SQL, and cost nothing where they are not indexed.

create table log (
  seq      integer primary key,           -- 1, 2, 3...: no gaps
  at_ms    integer not null,              -- Unix milliseconds
  kind     text not null,                 -- what happened: run.started, step.completed, reservation.held, ...
  resource text not null,                 -- the machine, app, order or worker it happened to
  flow     text not null,                 -- the flow, or '' for an operation that is one commit by itself
  run      text not null,
  step     text not null,
  attempt  integer not null,
  cause    text not null,                 -- the request or the local rule behind it; never ''
  trace    text not null,                 -- W3C traceparent of the request, or ''
  data     text not null,                 -- JSON object: what else there is to say
  writes   blob not null,                 -- JSON: [[table, key, row or null], ...] in order
  checksum blob not null                  -- 8 bytes of BLAKE2b over the previous checksum and all of the above
) strict;
create index log_resource on log (resource, seq);

create table machine (
  id text primary key, body text not null,
  app text generated always as (body ->> '$.app') virtual,
  name text generated always as (body ->> '$.name') virtual,
  region text generated always as (body ->> '$.region') virtual,
  state text generated always as (body ->> '$.state') virtual,
  desired text generated always as (body ->> '$.desired') virtual,
  version text generated always as (body ->> '$.version') virtual,
  instance text generated always as (body ->> '$.instance') virtual,
  cordoned integer generated always as (body ->> '$.cordoned') virtual,
  memory_mib integer generated always as (body ->> '$.resources.memory_mib') virtual,
  cause text generated always as (body ->> '$.cause') virtual,
  created_at_ms integer generated always as (body ->> '$.created_at_ms') virtual,
  updated_at_ms integer generated always as (body ->> '$.updated_at_ms') virtual
) without rowid;
create index machine_app on machine (app);
create index machine_instance on machine (instance) where instance <> '';

create table decision (id text primary key, body text not null) without rowid;

create table version (
  id text primary key, body text not null,
  machine text generated always as (body ->> '$.machine') virtual
) without rowid;
create index version_machine on version (machine);

create table event (
  id text primary key, body text not null,
  machine text generated always as (body ->> '$.machine') virtual,
  type text generated always as (body ->> '$.type') virtual,
  status text generated always as (body ->> '$.status') virtual,
  at_ms integer generated always as (body ->> '$.at_ms') virtual,
  run text generated always as (body ->> '$.run') virtual,
  step text generated always as (body ->> '$.step') virtual,
  cause text generated always as (body ->> '$.cause') virtual
) without rowid;
create index event_machine on event (machine);

create table reservation (
  id text primary key, body text not null,
  machine text generated always as (body ->> '$.machine') virtual,
  expires_at_ms integer generated always as (body ->> '$.expires_at_ms') virtual
) without rowid;
create index reservation_expiry on reservation (expires_at_ms);

create table fill (
  id text primary key, body text not null,
  machine text generated always as (body ->> '$.machine') virtual,
  at_ms integer generated always as (body ->> '$.at_ms') virtual
) without rowid;
create index fill_at on fill (at_ms);

create table claim (
  id text primary key, body text not null,
  worker text generated always as (body ->> '$.worker') virtual
) without rowid;

create table tally (id text primary key, body text not null) without rowid;

create table ledger (id text primary key, body text not null) without rowid;

create table lease (
  id text primary key, body text not null,
  owner text generated always as (body ->> '$.owner') virtual,
  expires_at_ms integer generated always as (body ->> '$.expires_at_ms') virtual
) without rowid;

create table app (
  id text primary key, body text not null,
  org text generated always as (body ->> '$.org') virtual,
  deleted integer generated always as (body ->> '$.deleted') virtual
) without rowid;

create table worker (id text primary key, body text not null) without rowid;

create table run (
  id text primary key, body text not null,
  flow text generated always as (body ->> '$.flow') virtual,
  resource text generated always as (body ->> '$.resource') virtual,
  status text generated always as (body ->> '$.status') virtual,
  error text generated always as (body ->> '$.error') virtual,
  cause text generated always as (body ->> '$.cause') virtual
) without rowid;
create index run_active on run (status) where status in ('active', 'parked');
-- At most one exclusive run per resource that has not ended: the database itself refuses a second.
create unique index run_exclusive on run (resource)
  where status in ('active', 'parked') and (body ->> '$.exclusive') = 1;
