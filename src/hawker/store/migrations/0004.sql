-- The worker's database, version 4: which machine has which port of the host.

create table port (
  id text primary key, body text not null,
  machine text generated always as (body ->> '$.machine') virtual
) without rowid;
create index port_machine on port (machine);
