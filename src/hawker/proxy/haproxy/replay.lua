-- A machine's answer says that its request is for another machine (fly-replay), and HAProxy passed it there without
-- asking. The activator gets the request now, with what the machine said, and follows that. It gives the app no machine
-- here again, so this is once for each app.
local LARGEST = 14000    -- bytes of an answer that fit HAProxy's buffer beside its head
local WITHIN_S = 75
local SAFE = { GET = true, HEAD = true, OPTIONS = true, TRACE = true }

local function lines_until_empty(socket)
  local found = {}
  while true do
    local line = socket:receive("*l")
    if line == nil then return nil end
    line = line:gsub("\r$", "")
    if line == "" then return found end
    found[#found + 1] = line
  end
end

local function body_of(socket, length, chunked)
  if length ~= nil then
    if length > LARGEST then return nil end
    return length == 0 and "" or socket:receive(length)
  end
  local parts, size = {}, 0
  while chunked do
    local count = tonumber((socket:receive("*l") or ""):match("^%x+"), 16)
    if count == nil then return nil end
    if count == 0 then return table.concat(parts) end
    size = size + count
    if size > LARGEST then return nil end
    parts[#parts + 1] = socket:receive(count)
    socket:receive("*l")
  end
  return ""
end

-- Machine, by what it said so, and that.
local function said_by(txn)
  local fields, lines = txn.http:res_get_headers(), {}
  for name, values in pairs(fields) do
    if name:sub(1, 10) == "fly-replay" then
      for _, value in pairs(values) do lines[#lines + 1] = name .. ": " .. value .. "\n" end
    end
  end
  local kind, text = "fields", table.concat(lines)
  if not fields["fly-replay"] then kind, text = "json", txn.f:res_body() end
  return txn.f:srv_name() .. " " .. kind .. " " .. txn.c:base64(text)
end

core.register_action("replay", { "http-res" }, function(txn, address)
  local method, url, head = txn.f:method(), txn.f:capture_req_uri(), txn:get_var("txn.head")
  local reply = txn:reply({ status = 502, reason = "Bad Gateway" })
  local socket = core.tcp()
  socket:settimeout(WITHIN_S)
  if socket:connect(address) and url and head then
    head = head:gsub("\r\n\r\n$", "\r\n")
    local client = txn:get_var("sess.said") or txn:get_var("sess.client")
    socket:send(method .. " " .. url .. " HTTP/1.1\r\n" .. head .. "hawker-client: " .. client
      .. "\r\nhawker-handed: " .. said_by(txn) .. "\r\nconnection: close\r\n\r\n" .. (txn:get_var("txn.body") or ""))
    local lines = lines_until_empty(socket)
    while lines and lines[1] and lines[1]:match("^HTTP/1.. 1") do lines = lines_until_empty(socket) end
    if lines and lines[1] then
      local status, reason = lines[1]:match("^HTTP/1.. (%d+) ?(.*)$")
      local length, chunked = nil, false
      reply:set_status(tonumber(status), reason)
      for at = 2, #lines do
        local name, value = lines[at]:match("^([^:]+):%s*(.-)%s*$")
        name = name:lower()
        if name == "content-length" then length = tonumber(value)
        elseif name == "transfer-encoding" then chunked = true
        elseif name ~= "connection" then reply:add_header(name, value) end
      end
      if method == "HEAD" or status == "204" or status == "304" then length = 0 end
      local body = body_of(socket, length, chunked)
      if body ~= nil then
        reply:set_body(body)
      elseif SAFE[method] then
        core.msleep(200)  -- until HAProxy was told that the app's requests are no longer its
        reply = txn:reply({ status = 307, reason = "Temporary Redirect", headers = { location = { url } } })
      else
        reply = txn:reply({ status = 502, reason = "Bad Gateway" })
      end
    end
  end
  socket:close()
  txn:done(reply)
end, 1)
